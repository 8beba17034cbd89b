"""`NanGuard`: the first step that is not finite, with its rows and its line."""

from pathlib import Path
from typing import Any

from lockstep.debug.nonfinite.diagnosis import NonFinite, NonFiniteError
from lockstep.debug.nonfinite.guard import Guard
from lockstep.loop import StepInfo


class NanGuard:
    """End the training at the first NaN or infinity, and say all about it.

    As `debug.nan_guard`, but no step waits for the devices: they look at the state once
    in `every` steps, and the answer is read two steps later. If it is bad, the steps
    since the look before run again, one by one. It costs the memory of two states and
    of the batches in between.

    Args:
        directory: for the folder `nan_step_120` with the saved call.
        every: how many steps lie between two looks.

    Raises:
        NonFiniteError: while training, at most `every + 2` steps late; `.report`
            holds what is known.

    Example:
        >>> callbacks = [NanGuard("run")]
    """

    def __init__(self, directory: str | Path = "run", *, every: int = 20) -> None:
        if every < 1:
            raise ValueError(f"NanGuard: every={every}; it is at least 1")
        self._directory, self._every = directory, every
        self._reports: list[NonFinite] = []
        self._guard: Guard | None = None
        self._step: Any = None

    def start(self, trainer: Any, state: Any) -> None:
        """Begin to observe the step."""
        self._reports, self._step = [], trainer.parallel
        self._guard = Guard(
            self._step, self._directory, self._every, self._reports.append, trainer.step
        )
        self._step.observers.append(self._guard)

    def observe(self, info: StepInfo) -> None:
        """Raise if something was found."""
        if self._reports:
            raise NonFiniteError(self._reports[0])

    def __call__(self, info: StepInfo) -> None:
        """Nothing more to do: the guard sees each call of the step."""

    def finish(self, info: StepInfo) -> None:
        """Look at the last steps too."""
        if self._guard is not None:
            self._guard.finish()
        self.observe(info)

    def close(self) -> None:
        """Observe no longer, and hold nothing."""
        if self._guard in getattr(self._step, "observers", ()):
            self._step.observers.remove(self._guard)
        self._guard = self._step = None
