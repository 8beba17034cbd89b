"""`Log`: interval means and results to the writers."""

from typing import Any

from lockstep.callbacks.interval import Interval
from lockstep.distributed import is_main_process
from lockstep.loop import StepInfo
from lockstep.writers import Console, Writer


class Log:
    """Write the means of the metrics since the last time it was called.

    `every(100, Log(...))` reads the metrics once in 100 steps, when the devices are
    done with them; the line of step 100 appears after step 102, two calls later. Under
    `steps_per_call` the lines are the same. A `Mean` is merged, a plain number averaged
    over the rows. Two more scalars say how fast it goes,
    `examples_per_second` and `seconds_per_step`: by the clock on the wall, with
    evaluations and padding, without the steps that compiled. Whatever other
    callbacks put into `info.results` is written too, under the step that it belongs
    to. Only the main process writes.

    Args:
        *writers: anything with `write(step, scalars)`; `writers.Console()` if none.

    Example:
        >>> import lockstep as ls
        >>> log = ls.every(100, Log(ls.writers.JsonLines("run/metrics.jsonl")))
    """

    each_step = True  # of a call of several, so that the lines are the same

    def __init__(self, *writers: Writer) -> None:
        for writer in writers:
            if not isinstance(writer, Writer):
                raise TypeError(
                    f"Log(...) takes writers, objects with write(step, scalars), and "
                    f"got a {type(writer).__name__}; a path belongs in "
                    "writers.JsonLines(path)"
                )
        self._writers = writers or (Console(),)
        self._active = False

    def start(self, trainer: Any, state: Any) -> None:
        """Open the writers, so that a bad path fails before the training."""
        self._active = is_main_process()
        self._interval = Interval()
        self._newest: StepInfo | None = None
        if self._active:
            self._each("open")

    def observe(self, info: StepInfo) -> None:
        """Take the metrics of a step, and write what the devices are done with."""
        if not self._active:
            return
        self._interval.add(info)
        for step, means in self._interval.ready():
            self._write(step, means)
        self._write_results()
        self._newest = info

    def __call__(self, info: StepInfo) -> None:
        """End an interval."""
        if self._active:
            self._interval.end()

    def finish(self, info: StepInfo) -> None:
        """Write what is left, the last and shorter interval included."""
        if self._active:
            self._write_rest()

    def close(self) -> None:
        """Write what a failure left, and close the writers."""
        if not self._active:
            return
        self._active = False
        try:
            self._write_rest()
        finally:
            self._each("close")

    def _write_rest(self) -> None:
        for step, means in self._interval.rest():
            self._write(step, means)
        self._write_results()

    def _write_results(self) -> None:
        """Results of the step before: by now each callback has had its turn."""
        newest, self._newest = self._newest, None
        if newest is not None and newest.results:
            self._write(newest.step, newest.results)

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, scalars)

    def _each(self, method: str) -> None:
        for writer in self._writers:
            getattr(writer, method, lambda: None)()
