"""A step on every device: `parallelize` (global view), `per_device` (device view)."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from lockstep.devices import make_mesh
from lockstep.parallel.options import Options, argnums
from lockstep.parallel.parallel_step import ParallelStep
from lockstep.step import TrainStep


def parallelize(
    fn: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    donate_argnums: int | tuple[int, ...] | None = None,
    remainder: str = "error",
    mask_name: str = "mask",
    max_compiles: int | None = None,
) -> ParallelStep:
    """Run an unchanged single-device step over all devices (the global view).

    The step sees the whole global batch; XLA splits its work along the mesh axis
    "data". The mean over the batch is the averaged gradient, BatchNorm sees all rows,
    a dropout mask is the one-device mask. The step holds no `lax.pmean`.

    Args:
        fn: `(state, batch, ...) -> (state, metrics)`, or any function of arrays.
        mesh: the devices; all of them, on one axis "data", when `None`.
        batch_argnums: which arguments are split by rows; all others are replicated.
        donate_argnums: which arguments' memory is reused; `None` donates argument 0
            when the first output has its tree, shapes and dtypes.
        remainder: what to do with rows that do not divide: "error", "pad", "drop" or
            "unsplit" (see `shard_batch`).
        mask_name: where a step finds the mask in a padded dict batch.
        max_compiles: raise instead of compiling more often than this.

    Raises:
        ValueError: rows that do not divide, a step with `lax.pmean`, a lost mutation.
        TypeError: the step changes the structure, shapes or dtypes of its state.
        RuntimeError: more than `max_compiles`; says what changed.

    Example:
        >>> import jax.numpy as jnp
        >>> step = parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        >>> w, total = step(jnp.zeros(3), jnp.ones((16, 3)))
        >>> float(total)
        48.0
    """
    if isinstance(fn, TrainStep) and fn.view == "device":
        raise ValueError(
            f"this train step was made with axis_name={fn.axis_name!r} and averages by "
            "itself: use per_device(step), or make it without axis_name"
        )
    options = _options(
        fn, mesh, None, batch_argnums, donate_argnums, remainder, mask_name
    )
    return ParallelStep(options, max_compiles=max_compiles)


def per_device(
    fn: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    axis_name: str = "data",
    batch_argnums: int | tuple[int, ...] = 1,
    donate_argnums: int | tuple[int, ...] | None = None,
    remainder: str = "error",
    mask_name: str = "mask",
    max_compiles: int | None = None,
) -> ParallelStep:
    """Run a step that averages by itself on every device (the device view).

    The step sees one shard and calls `lax.pmean(grads, axis_name)`, as under `pmap`,
    but arrays are global: no leading device axis. One key is folded with the device's
    number, `[N]` keys are given out one a device. A scalar output that differs between
    devices comes back as its mean, a `Mean` is summed, other arrays come back stacked,
    `[N, ...]`.

    Args:
        fn: `(state, batch, ...) -> (state, metrics)` for one shard.
        mesh: the devices; all of them when `None`.
        axis_name: the name that the step's collectives use. A mesh axis "data" serves
            under any name.
        batch_argnums: as in `parallelize`.
        donate_argnums: as in `parallelize`.
        remainder: "error", "pad" or "drop".
        mask_name: as in `parallelize`.
        max_compiles: as in `parallelize`.

    Raises:
        ValueError: a step that averages nothing, a wrong axis name, equal draws on
            all devices from a key in the state.
        ReplicaMismatch: after the first step, when the replicas of the state differ.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(w, x):
        ...     return w - 0.1 * jax.lax.pmean(x.mean(0), "batch"), x.sum()
        >>> step = per_device(step, axis_name="batch")
        >>> w, total = step(jnp.zeros(3), jnp.ones((16, 3)))
        >>> float(total)  # the mean over 8 devices of 2 rows of ones
        6.0
    """
    if isinstance(fn, TrainStep):
        if fn.view == "global":
            raise ValueError(
                "this train step sees the whole batch: use parallelize(step), or make "
                f"it with make_train_step(..., axis_name={axis_name!r})"
            )
        axis_name = fn.axis_name or axis_name
    if remainder == "unsplit":
        raise ValueError(
            "remainder='unsplit' gives every device the whole short batch, which the "
            "device view cannot average: use 'pad' or 'drop', or parallelize"
        )
    options = _options(
        fn, mesh, axis_name, batch_argnums, donate_argnums, remainder, mask_name
    )
    return ParallelStep(options, max_compiles=max_compiles)


def as_parallel(
    step: Any, mesh: Mesh | None = None, remainder: str | None = None
) -> ParallelStep:
    """A step ready to run: wrapped in its own view unless it is wrapped already.

    Raises:
        ValueError: a wrapped step with another mesh or remainder than asked for.
    """
    if not isinstance(step, ParallelStep):
        wrapper = parallelize
        if isinstance(step, TrainStep) and step.view == "device":
            wrapper = per_device
        return wrapper(step, mesh, remainder=remainder or "error")
    if mesh is not None and mesh != step.mesh:
        raise ValueError(
            f"the step runs on {step.mesh} and was asked to run on {mesh}: give the "
            "mesh once, to parallelize or per_device"
        )
    if remainder not in (None, step.remainder):
        raise ValueError(
            f"the step has remainder={step.remainder!r} and was asked for "
            f"{remainder!r}: set it once, in parallelize or per_device"
        )
    return step


def _options(
    fn: Callable[..., Any],
    mesh: Mesh | None,
    device_axis: str | None,
    batch_argnums: int | tuple[int, ...],
    donate_argnums: int | tuple[int, ...] | None,
    remainder: str,
    mask_name: str,
) -> Options:
    return Options(
        fn=fn,
        mesh=make_mesh() if mesh is None else mesh,
        device_axis=device_axis,
        batch_argnums=argnums(batch_argnums),
        donate_argnums=None if donate_argnums is None else argnums(donate_argnums),
        remainder=remainder,
        mask_name=mask_name,
    )
