"""`Progress`: how far the training is, and how well it goes, for a person to watch."""

import time
from collections.abc import Callable
from typing import Any

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
        from rich.console import Console

        console = self._console or Console()
        drawn = console.is_terminal or console.is_jupyter
        self._period_s = self._periods_s[0] if drawn else self._periods_s[1]
        kind = _Bar if drawn else _Lines
        self._display = kind(console, trainer.total, trainer.step)
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
        self._display.show(info.step, info.epoch, text)


class _Bar:
    """A bar that redraws itself in place."""

    def __init__(self, console: Any, total: int | None, done: int) -> None:
        from rich import progress

        columns = [
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}"),
        ]
        # No thread of its own: it would take time from the loop when nothing is new.
        self._bar = progress.Progress(*columns, console=console, auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task(
            "compiling", total=total, completed=done, text=""
        )
        self._bar.refresh()

    def show(self, step: int, epoch: int, text: str) -> None:
        self._bar.update(
            self._task, completed=step, description=f"epoch {epoch}", text=text
        )
        self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


class _Lines:
    """A line from time to time, for files and pipes."""

    def __init__(self, console: Any, total: int | None, done: int) -> None:
        self._file = console.file
        self._of = "" if total is None else f"/{total}"

    def show(self, step: int, epoch: int, text: str) -> None:
        line = f"step {step}{self._of} (epoch {epoch})"
        print(f"{line}: {text}" if text else line, file=self._file, flush=True)

    def close(self) -> None:
        pass
