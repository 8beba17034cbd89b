"""`no_transfers`: a step that refuses what comes from elsewhere in every call."""

from typing import Any

from lockstep.parallel import as_parallel
from lockstep.transfers import NoTransfers


def no_transfers(step: Any) -> Any:
    """Refuse arguments that do not lie on the step's devices, and name them.

    A batch from the host, a Python learning rate or an array on one device is copied
    in every call, silently. Here that is an error; the state of the first call may come
    from anywhere. In a `Trainer` it is `transfer_guard="error"`.

    Args:
        step: a plain step, a `TrainStep`, what `parallelize`, `per_device` or
            `compat.pmap` returned.

    Returns:
        The step, to be called as before.

    Raises:
        RuntimeError: when it is called; says which argument, and what to do.

    Example:
        >>> step = no_transfers(lambda w, x: (w + x.mean(), None))
        >>> w = 0.0
        >>> for x in ls.prefetch([np.ones(8, np.float32)] * 2, step):
        ...     w, _ = step(w, x)
    """
    if not hasattr(step, "observers"):
        step = as_parallel(step)
    step.observers.append(NoTransfers())
    return step
