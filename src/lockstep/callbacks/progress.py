"""`Progress`: how far the training is, and how well it goes, for a person to watch."""

import time
from collections.abc import Callable
from typing import Any

from lockstep.callbacks.displays import Lines, display_for
from lockstep.callbacks.interval import Interval
from lockstep.distributed import is_main_process
from lockstep.loop import StepInfo
from lockstep.writers import in_words


class Progress:
    """A progress bar in terminals and notebooks, plain lines everywhere else.

    It shows the means of the metrics since the last refresh, examples per second and
    the newest results of other callbacks. It reads no step before the devices are
    done with it. Only the main process shows it.

    Args:
        refresh_s: seconds between two refreshes of the bar.
        lines_s: seconds between two lines where there is no terminal.
        console: a `rich.console.Console` to draw on.
        clock: seconds, to know when a refresh is due.

    Example:
        >>> callbacks = [Progress()]
    """

    def __init__(
        self,
        *,
        refresh_s: float = 0.25,
        lines_s: float = 10.0,
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._periods_s = (refresh_s, lines_s)
        self._console = console
        self._clock = clock
        self._display: Any = None
        self._results: dict[str, float] = {}

    def start(self, trainer: Any, state: Any) -> None:
        """Show that the first step is being compiled."""
        if not is_main_process():
            return
        self._display = display_for(self._console, trainer.total, trainer.step)
        refresh_s, lines_s = self._periods_s
        self._period_s = lines_s if isinstance(self._display, Lines) else refresh_s
        self._interval = Interval()
        self._shown: dict[str, float] = {}
        self._results = {}
        self._due = self._clock() + self._period_s

    def observe(self, info: StepInfo) -> None:
        """Take the metrics of a step; refresh if it is time."""
        if self._display is None:
            return
        self._interval.add(info)
        for _, means in self._interval.ready():
            self._shown = means
            self._show(info)
        if self._clock() >= self._due:
            self._interval.end()
            self._due = self._clock() + self._period_s

    def __call__(self, info: StepInfo) -> None:
        """Take what the callbacks before found at this step."""
        self._results |= info.results

    def finish(self, info: StepInfo) -> None:
        """Show the last steps."""
        if self._display is None:
            return
        for _, means in self._interval.rest():
            self._shown = means
        self._show(info)

    def close(self) -> None:
        """Leave the last picture where it is."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _show(self, info: StepInfo) -> None:
        scalars = dict(self._shown)
        speed = scalars.pop("examples_per_second", None)
        scalars.pop("seconds_per_step", None)
        scalars |= self._results
        text = in_words(scalars)
        if speed is not None:
            text += f"{', ' if text else ''}{speed:,.0f} examples/s"
        self._display.show(info.step, f"epoch {info.epoch}", text)
