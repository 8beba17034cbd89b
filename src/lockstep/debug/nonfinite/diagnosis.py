"""What is known of a step whose numbers went bad: which leaves, who, which line."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import tree
from lockstep.debug.comparing.trials import Call
from lockstep.debug.nonfinite.alone import Alone, Output, is_inexact
from lockstep.debug.nonfinite.origin import Origin, find_origin
from lockstep.debug.nonfinite.rows import MOST_ROWS, find_rows

MOST_LINES = 5


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first step with NaN or infinity in its loss or its new state.

    Attributes:
        step: its number.
        function: the name of the step.
        leaves: the outputs that hold it, one line each.
        before: the inputs that held it before, one line each.
        rows: position of the device -> its bad rows, numbered as in the caller's batch
            (with `compat.pmap`: on that device).
        places: the devices and rows in words, one line each.
        origin: the operation that made it; `None` where an input held it, or no device
            alone makes it.
        directory: where the call was saved.
    """

    step: int
    function: str
    leaves: tuple[str, ...]
    before: tuple[str, ...] = ()
    rows: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    places: tuple[str, ...] = ()
    origin: Origin | None = None
    directory: Path | None = None

    def __str__(self) -> str:
        """The whole report."""
        if not self.leaves:
            return f"{self.function}: all is finite at step {self.step}"
        lines = [f"{self.function} is not finite at step {self.step}:"]
        lines += [f"  {line}" for line in _cut(self.leaves)]
        lines += [f"  before the step: {line}" for line in _cut(self.before)]
        lines += _cut(self.places)
        if self.origin:
            lines.append(str(self.origin))
        if self.directory:
            lines.append(
                f"saved: `lockstep replay {self.directory}` repeats it on one device"
            )
        return "\n".join(lines)


class NonFiniteError(FloatingPointError):
    """A guarded step gave NaN or infinity.

    Attributes:
        report: what is known of it.
    """

    def __init__(self, report: NonFinite) -> None:
        """The report is the message."""
        super().__init__(str(report))
        self.report = report


def diagnose(
    step: Alone, call: Call, number: int, outputs: Iterable[Output] = ()
) -> NonFinite:
    """Look for the devices, the rows and the line behind bad outputs.

    Args:
        step: the step.
        call: its whole call, on the host.
        number: of the step.
        outputs: what it returned on all devices, as far as it is watched.
    """
    state = call.args[:1] if step.batch_argnums != (0,) else ()
    old = [line for arg in state for line in describe(tree.named_leaves(arg, "state"))]
    ignored = {line.split(": ")[0] for line in old}

    def is_bad(part: Call) -> bool:
        return any(p not in ignored and not_finite(x) for p, x in step.run(part))

    devices = step.devices(call)
    parts = [step.part(call, i) for i in range(len(devices))]
    held = {i: _rows_with_nan(step, part) for i, part in enumerate(parts)}
    bad = [i for i in held if held[i]] or [i for i in held if is_bad(parts[i])]
    rows = {i: held[i] or _search(step, parts[i], is_bad) for i in bad[:MOST_LINES]}
    if not outputs and bad:
        outputs = [(p, x) for p, x in step.run(parts[bad[0]]) if p not in ignored]
    origin = find_origin(*step.trace(parts[bad[0]])) if bad else None
    by_input = any(held.values())
    return NonFinite(
        step=number,
        function=step.name,
        leaves=tuple(describe(outputs)),
        before=tuple(old),
        rows={i: tuple(step.first_row(call, i) + r for r in rows[i]) for i in rows},
        places=tuple(_places(step, call, rows, bad, by_input)),
        origin=origin,
    )


def describe(leaves: Iterable[tuple[str, Any]]) -> list[str]:
    """The leaves that are not finite, one line each.

    Example:
        >>> describe([("loss", np.float32("nan")), ("w", np.array([1, np.inf, 2]))])
        ['loss: nan', 'w: inf in 1 of 3 values, first at [1]']
    """
    return [
        f"{path}: {_contents(np.asarray(leaf))}"
        for path, leaf in leaves
        if not_finite(leaf)
    ]


def not_finite(leaf: Any) -> bool:
    """Whether a host value holds NaN or infinity."""
    return is_inexact(leaf) and not _finite(np.asarray(leaf)).all()


def _contents(value: np.ndarray) -> str:
    bad = ~_finite(value)
    nan = (value != value).any()
    kind = "nan" if nan else "inf"
    if not value.shape:
        return kind
    first = ", ".join(str(int(i)) for i in np.argwhere(bad)[0])
    return f"{kind} in {bad.sum()} of {bad.size} values, first at [{first}]"


def _finite(value: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(value) else np.float64
    return np.isfinite(value.astype(wide))  # NumPy cannot ask it of bfloat16


def _rows_with_nan(step: Alone, part: Call) -> list[int]:
    """Rows of the batch that are not finite as they came."""
    bad = np.zeros(step.rows(part), bool)
    for value in filter(is_inexact, step.row_values(part)):
        if len(value) == len(bad):
            bad |= ~_finite(value).reshape(len(bad), -1).all(1)
    return [int(row) for row in np.flatnonzero(bad)]


def _search(step: Alone, part: Call, is_bad: Any) -> list[int]:
    count = step.rows(part)
    return find_rows(step, part, is_bad) if count > 1 else list(range(count))


def _places(
    step: Alone, call: Call, rows: dict[int, list[int]], bad: list[int], by_input: bool
) -> list[str]:
    devices = step.devices(call)
    if not bad:
        return ["no device's part makes it alone: it comes from all rows together"]
    if (
        len(bad) == len(devices) > 1
        and not by_input
        and not any(
            0 < len(rows.get(i, ())) < step.rows(step.part(call, i)) for i in bad
        )
    ):
        return ["every device and row makes it: it comes from the state, not the batch"]
    found = []
    for i in bad[:MOST_LINES]:
        device = devices[i]
        first = step.first_row(call, i)
        text = f"device {device.id} (process {device.process_index})"
        if rows[i]:
            shown = [str(first + r) for r in rows[i][:MOST_ROWS]]
            more = "" if len(rows[i]) <= MOST_ROWS else " and more"
            text += f", batch row{'s' * (len(shown) > 1)} {', '.join(shown)}{more}"
        found.append(f"{text}: {'holds' if by_input else 'makes'} it")
    if len(bad) > MOST_LINES:
        found.append(f"and {len(bad) - MOST_LINES} more devices")
    return found


def _cut(lines: tuple[str, ...]) -> list[str]:
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [*lines[:MOST_LINES], *more]
