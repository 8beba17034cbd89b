"""Looking closer while training: are the replicas equal, where does the time go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lockstep.debug import FirstCall, memory_now
from lockstep.distributed import is_main_process
from lockstep.loop import StepInfo
from lockstep.notices import say_once
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


class Inspect:
    """Show reports on the step, made of its first call, before that runs.

    Args:
        tools: functions of `(step, *args)`, as `lockstep.debug.collectives` and
            `lockstep.debug.memory`.
        show: what is done with the text of each report; the main process does it.

    Example:
        >>> inspect = Inspect(ls.debug.collectives, ls.debug.memory)
    """

    def __init__(
        self, *tools: Callable[..., Any], show: Callable[[str], Any] = print
    ) -> None:
        self._observer = FirstCall(*tools, show=self._show_once)
        self._show = show
        self._step: Any = None

    def start(self, trainer: Any, state: Any) -> None:
        """Wait for the first call of the step."""
        self._step = trainer.parallel
        self._step.observers.append(self._observer)

    def __call__(self, info: StepInfo) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Leave a step that was never called."""
        if self._observer in self._step.observers:
            self._step.observers.remove(self._observer)

    def _show_once(self, text: str) -> None:
        if is_main_process():
            self._show(text)


class WatchMemory:
    """Look at what the devices hold, and warn when one holds much more than another.

    Puts `memory/fullest` and `memory/emptiest` (bytes on the fullest and emptiest
    device of this process) into the results of the step, where `Log` finds them.

    Args:
        min_bytes: devices that differ by less are taken to be equally full.

    Example:
        >>> watch = ls.every(500, WatchMemory())
    """

    def __init__(self, *, min_bytes: int = 1 << 20) -> None:
        self.min_bytes = min_bytes

    def __call__(self, info: StepInfo) -> None:
        """Count, and warn once."""
        now = memory_now(min_bytes=self.min_bytes)
        held = now.by_device.values()
        info.results["memory/fullest"] = float(max(held))
        info.results["memory/emptiest"] = float(min(held))
        for text in now.warnings:
            say_once("WatchMemory", f"step {info.step}: {text}")


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
        if self.first - 1 in info.call:
            self._begin(info.state)
        elif self.last in info.call and self._recording:
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
