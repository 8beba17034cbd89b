"""`Evaluate`: metrics of the current state on other batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lockstep.evaluation import evaluate
from lockstep.loop import StepInfo


class Evaluate:
    """Run `evaluate` on the current state and put the metrics into `info.results`.

    From there `Log`, `Plot` and `Progress` take them, and `StopEarly` if it stands
    later in the list. Each row counts once, those of a short last batch included.

    Args:
        step: `(state, batch) -> metrics`, as `evaluate` takes it.
        batches: what can be iterated again: a list, a loader, `data.batches(...)`.
        name: the first part of the names of the results, as in `valid/loss`.

    Raises:
        TypeError: `batches` is an iterator, which can be read only once.

    Example:
        >>> import lockstep as ls
        >>> def eval_step(w, batch):
        ...     return {"error": abs(batch - w)}
        >>> import jax.numpy as jnp
        >>> valid = Evaluate(eval_step, [jnp.arange(8.0)])
        >>> train_step = lambda w, x: (w + 1, {})
        >>> trainer = ls.Trainer(train_step, callbacks=[valid])
        >>> for info in trainer.steps(0.0, [jnp.zeros(8)], steps=2):
        ...     print(info.step, info.results)
        1 {'valid/error': 2.75}
        2 {'valid/error': 2.25}
    """

    def __init__(
        self,
        step: Callable[..., Any],
        batches: Iterable[Any],
        *,
        name: str = "valid",
    ) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"Evaluate reads its batches again each time, and a "
                f"{type(batches).__name__} is used up after one: give a list, a loader "
                "or data.batches(...)"
            )
        self.step, self.batches, self.name = step, batches, name

    def __call__(self, info: StepInfo) -> None:
        """Evaluate the state of this step."""
        metrics = evaluate(self.step, info.state, self.batches)
        info.results.update({f"{self.name}/{k}": v for k, v in metrics.items()})
