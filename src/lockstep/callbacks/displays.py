"""Three ways to show how far a run is: a bar, a notebook cell, plain lines."""

from typing import Any

_WIDTH = 12


def display_for(console: Any, total: int | None, done: int) -> Any:
    """The display that the place of the output can show.

    Args:
        console: a `rich.console.Console`; one on standard output if `None`.
        total: the number of the last step, if it is known.
        done: how many steps are finished.
    """
    from rich.console import Console

    console = console or Console()
    if console.is_jupyter:
        return Cell(total, done)
    return Bar(console, total, done) if console.is_terminal else Lines(console, total)


class Bar:
    """A bar in a terminal, drawn in place."""

    def __init__(self, console: Any, total: int | None, done: int) -> None:
        from rich import progress
        from rich.table import Column

        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = [
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=_WIDTH),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}", table_column=rest),
        ]
        # No thread of its own: it would take time from the loop when nothing is new.
        self._bar = progress.Progress(
            *columns, console=console, auto_refresh=False, expand=True
        )
        self._bar.start()
        self._task = self._bar.add_task(_WAITING, total=total, completed=done, text="")
        self._bar.refresh()

    def show(self, step: int, where: str, text: str) -> None:
        """Draw anew."""
        self._bar.update(self._task, completed=step, description=where, text=text)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


class Cell:
    """A line in the output of a notebook cell, replaced in place.

    Rich needs ipywidgets for this; notebooks themselves do not.
    """

    def __init__(self, total: int | None, done: int) -> None:
        from IPython.display import display

        self._total = total
        line = self._line(done, _WAITING, "")
        self._handle: Any = display(line, raw=True, display_id=True)

    def show(self, step: int, where: str, text: str) -> None:
        """Replace the line."""
        self._handle.update(self._line(step, where, text), raw=True)

    def close(self) -> None:
        """Leave the line as it is."""

    def _line(self, step: int, where: str, text: str) -> dict[str, str]:
        bar = ""
        if self._total:
            full = _WIDTH * step // self._total
            bar = "━" * full + "╌" * (_WIDTH - full) + " "
        return {"text/plain": f"{where} {bar}{step}{_of(self._total)} {text}".rstrip()}


class Lines:
    """A line from time to time, for files and pipes."""

    def __init__(self, console: Any, total: int | None) -> None:
        self._file, self._total = console.file, total

    def show(self, step: int, where: str, text: str) -> None:
        """Print one more line."""
        line = f"step {step}{_of(self._total)} ({where})"
        print(f"{line}: {text}" if text else line, file=self._file, flush=True)

    def close(self) -> None:
        """Nothing to tidy up."""


_WAITING = "compiling"


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"
