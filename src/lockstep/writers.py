"""Where scalars go: the console, a file of JSON lines, TensorBoard.

A writer is anything with `write(step, scalars)`. Two methods are optional: `open()`
is called when a run starts, so that a bad path fails before the training and not
after it, and `close()` when the run is over. A later `write` opens again and appends,
so one writer serves several callbacks and several runs.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable


@runtime_checkable
class Writer(Protocol):
    """Takes the scalars of one step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep `scalars` as the numbers of `step` (finished steps, from 1)."""
        ...


class Console:
    """One plain line a step on standard output, or on the stream that is given.

    Example:
        >>> Console().write(100, {"loss": 0.25, "examples_per_second": 12345.6})
        step 100: loss 0.25, examples_per_second 12,346
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print the line at once."""
        # Looked up late: a progress bar and a notebook replace sys.stdout.
        stream = sys.stdout if self._stream is None else self._stream
        print(f"step {step}: {in_words(scalars)}", file=stream, flush=True)


class JsonLines:
    """One JSON object a line: `{"step": 100, "loss": 0.25}`.

    Lines are appended and flushed one by one, so a stopped run loses none and a
    resumed one goes on in the same file. Where steps are repeated after a resume,
    the last line of a step counts. JSON has no NaN: numbers that are not finite are
    the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float` reads back.

    Args:
        path: the file; its folders are made when the run starts.

    Raises:
        OSError: on `open` or `write`: a folder is there, or it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file for appending, unless it is open already."""
        if self._file is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except IsADirectoryError as error:
            raise IsADirectoryError(
                f"JsonLines({str(self.path)!r}): this is a folder; give the path of a "
                f"file, such as {str(self.path / 'metrics.jsonl')!r}"
            ) from error
        except OSError as error:
            raise _unwritable(self, self.path, error) from error
        if _is_cut_off(self.path):
            self._file.write("\n")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line and flush it."""
        self.open()
        assert self._file is not None
        line = {"step": int(step)} | {k: _as_json(v) for k, v in scalars.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Release the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class TensorBoard:
    """TensorBoard event files, written by tensorboardX (no TensorFlow needed).

    Args:
        logdir: the folder for the event files; made when the run starts.

    Raises:
        ImportError: on `open` or `write`: tensorboardX is not installed.
        OSError: on `open` or `write`: the folder cannot be written.
    """

    def __init__(self, logdir: str | Path) -> None:
        self.logdir = Path(logdir)
        self._events: Any = None

    def open(self) -> None:
        """Start an event file, unless one is open already."""
        if self._events is not None:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the TensorBoard writer needs tensorboardX: "
                "pip install 'lockstep-jax[tensorboard]'"
            ) from error
        try:
            self._events = SummaryWriter(str(self.logdir), flush_secs=10)
        except OSError as error:
            raise _unwritable(self, self.logdir, error) from error

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one point to each curve; `valid/loss` is the curve `loss` of `valid`."""
        self.open()
        for name, value in scalars.items():
            self._events.add_scalar(name, float(value), int(step))

    def close(self) -> None:
        """Flush and close the event file."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


def in_words(scalars: Mapping[str, float]) -> str:
    """Scalars for a person to read: four digits, thousands with commas.

    Example:
        >>> in_words({"loss": 0.123456, "steps": 12000})
        'loss 0.1235, steps 12,000'
    """
    return ", ".join(f"{name} {_number(value)}" for name, value in scalars.items())


def _number(value: float) -> str:
    value = float(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def _as_json(value: float) -> float | str:
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _is_cut_off(path: Path) -> bool:
    """Whether the file ends inside a line, as a killed run may leave it."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _unwritable(writer: object, path: Path, error: OSError) -> OSError:
    name = type(writer).__name__
    return type(error)(
        f"{name}({str(path)!r}) cannot be written: {error.strerror or error}; "
        "give a path in a folder that you may write to"
    )
