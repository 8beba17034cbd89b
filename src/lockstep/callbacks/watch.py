"""Looking closer while training: are the replicas equal, where does the time go."""

from pathlib import Path
from typing import Any

import jax

from lockstep.distributed import is_main_process
from lockstep.loop import StepInfo
from lockstep.replicas import check_replicas


class CheckReplicas:
    """Compare the state between all devices, bit for bit.

    Raises:
        ReplicaMismatch: while training; names the first leaf that differs.

    Example:
        >>> import lockstep as ls
        >>> check = ls.every(500, CheckReplicas())
    """

    def __call__(self, info: StepInfo) -> None:
        """Check the state of this step."""
        check_replicas(info.state)


class Profile:
    """Record a trace of some steps, for TensorBoard, XProf or Perfetto.

    The main process writes below `logdir`. Recording begins when the steps before
    are done and ends when its own are, so it holds those steps alone.

    Args:
        logdir: the folder for the trace.
        start: the first step to record, from 1. The first steps compile and are no
            picture of the others.
        steps: how many steps to record.

    Example:
        >>> profile = Profile("run/profile", start=10, steps=5)
    """

    def __init__(self, logdir: str | Path, *, start: int = 10, steps: int = 5) -> None:
        if start < 1 or steps < 1:
            raise ValueError(
                f"Profile: start={start}, steps={steps}; both are at least 1"
            )
        self.logdir = Path(logdir)
        self.first, self.last = start, start + steps - 1
        self._recording = False

    def start(self, trainer: Any, state: Any) -> None:
        """Begin at once if the first step is to be recorded."""
        if self.first == trainer.step + 1:
            self._begin(state)

    def __call__(self, info: StepInfo) -> None:
        """Begin before the first step of the trace, end after its last."""
        if info.step == self.first - 1:
            self._begin(info.state)
        elif info.step == self.last and self._recording:
            jax.block_until_ready(info.metrics)
            self.close()

    def close(self) -> None:
        """End the trace, also when the run ended before it."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()

    def _begin(self, state: Any) -> None:
        if is_main_process():
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.logdir))
            self._recording = True
