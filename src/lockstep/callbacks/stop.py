"""Reasons to stop: no more progress, or numbers that are no numbers any more."""

import logging
import math
from typing import Any

import jax
import numpy as np

from lockstep.loop import StepInfo
from lockstep.metrics import join
from lockstep.parallel.run_ahead import MAX_IN_FLIGHT

_log = logging.getLogger("lockstep")


class StopEarly:
    """Stop when a result has not improved for `patience` evaluations.

    It reads `info.results`, so it stands after the callback that makes the result,
    such as `Evaluate`. NaN is no improvement.

    Args:
        metric: the name of a result, such as `"valid/accuracy"`.
        patience: how many results in a row may be no better than the best.
        mode: `"max"` if more is better (accuracy), `"min"` if less is (loss).
        min_delta: what counts as better must be so by more than this.

    Raises:
        ValueError: a bad argument; while training, a metric that `Evaluate` does not
            return, or that never came.

    Example:
        >>> stop = StopEarly("valid/loss", patience=3, mode="min")
    """

    def __init__(
        self, metric: str, *, patience: int, mode: str, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"StopEarly: mode={mode!r}; it is 'min' or 'max'")
        if patience < 1:
            raise ValueError(f"StopEarly: patience={patience}; it is at least 1")
        self.metric, self.patience = metric, patience
        self.mode, self.min_delta = mode, min_delta
        self.best: float | None = None
        self.best_step = 0
        self._waited = 0
        self._seen: set[str] = set()

    def start(self, trainer: Any, state: Any) -> None:
        """Forget the run before."""
        self.best, self.best_step, self._waited = None, 0, 0
        self._seen = set()

    def __call__(self, info: StepInfo) -> bool:
        """Judge a new result, if there is one."""
        if self.metric not in info.results:
            self._check_name(info.results)
            return False
        value = float(info.results[self.metric])
        if self._is_better(value):
            self.best, self.best_step, self._waited = value, info.step, 0
            return False
        self._waited += 1
        if self._waited < self.patience:
            return False
        best = "never a number" if self.best is None else f"{self.best:.6g}"
        _log.warning(
            "stopped early at step %d: %s is %.6g and has not improved in %d "
            "evaluations; the best was %s at step %d",
            *(info.step, self.metric, value, self._waited, best, self.best_step),
        )
        return True

    def finish(self, info: StepInfo) -> None:
        """Complain about a result that never came."""
        if self.best is None and not self._waited:
            _log.warning(
                "StopEarly never saw %r (results: %s): put it after the callback that "
                "makes this result, such as every(n, Evaluate(...))",
                *(self.metric, ", ".join(sorted(self._seen)) or "none"),
            )

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def _check_name(self, results: dict[str, float]) -> None:
        self._seen |= results.keys()
        group = self.metric.rpartition("/")[0]
        if any(name.rpartition("/")[0] == group for name in results):
            raise ValueError(
                f"StopEarly waits for {self.metric!r}, which is not among the results: "
                f"{', '.join(sorted(results))}"
            )


class StopOnNonFinite:
    """End the training with an error when a metric is NaN or infinite.

    The metrics are read in blocks, when the devices are done with them: no step waits,
    and the error comes at most `steps + 2` steps late, still with the number of the
    step where it happened.

    Args:
        steps: how many steps are read at once.

    Raises:
        FloatingPointError: while training; says the step, the metric and its value.

    Example:
        >>> callbacks = [StopOnNonFinite()]
    """

    def __init__(self, *, steps: int = 20) -> None:
        if steps < 1:
            raise ValueError(f"StopOnNonFinite: steps={steps}; it is at least 1")
        self.steps = steps
        self._held: list[tuple[int, Any]] = []

    def start(self, trainer: Any, state: Any) -> None:
        """Forget the run before."""
        self._held = []

    def observe(self, info: StepInfo) -> None:
        """Take the metrics of a step; look at a block that is done."""
        self._held.append((info.step, info.metrics))
        if len(self._held) >= self.steps + MAX_IN_FLIGHT:
            done, self._held = self._held[: self.steps], self._held[self.steps :]
            _check(done)

    def __call__(self, info: StepInfo) -> None:
        """Nothing more to do: `observe` has seen the step."""

    def finish(self, info: StepInfo) -> None:
        """Look at the last steps too."""
        done, self._held = self._held, []
        _check(done)


def _check(done: list[tuple[int, Any]]) -> None:
    values = jax.device_get([jax.tree.leaves(metrics) for _, metrics in done])
    for (step, metrics), leaves in zip(done, values, strict=True):
        if all(map(_is_finite, leaves)):
            continue
        paths = jax.tree_util.tree_flatten_with_path(metrics)[0]
        name, value = next(
            (join(path), value)
            for (path, _), value in zip(paths, leaves, strict=True)
            if not _is_finite(value)
        )
        shown = float(value) if np.ndim(value) == 0 else "not finite everywhere"
        raise FloatingPointError(
            f"metric {name!r} is {shown} at step {step}: the training has diverged. A "
            "smaller learning rate or gradient clipping may help; the newest state is "
            "trainer.state"
        )


def _is_finite(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or bool(np.isfinite(value).all())
