"""The report of `compare`: a table of outputs, a verdict, and likely causes."""

import dataclasses
import html
import textwrap

from lockstep.tables import as_html, as_text

_HEAD = ("output", "verdict", "difference", "")
_SHOWN = 30
# In the order of what a reader must see first.
_ORDER = ("wrong", "per device", "random", "no signal", "rounding", "equal")
_MEANING = {
    "per device": "one value a device, with no counterpart on one device: not compared",
    "random": "each device folds the key with its own number, so masks depend on the "
    "device count; the difference is no larger than another key makes",
    "no signal": "rounding alone moves it as far as the step does: nothing to compare",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One output of the step.

    Attributes:
        path: its name, as `state['w']`.
        verdict: "equal", "rounding", "no signal", "random", "per device" or "wrong".
        difference: relative to the value on one device, in 2-norm.
        note: what the numbers say, as `4.00 x`.
    """

    path: str
    verdict: str
    difference: float
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a step on N devices compares with the same step on one.

    Attributes:
        devices: the two numbers of devices.
        rows: one for each output.
        causes: the likely causes; empty when nothing is wrong, or no cause visible.
        advice: what to show, when something is wrong and no cause is visible.
        notes: what was changed for the comparison.
    """

    devices: tuple[int, int]
    rows: tuple[Row, ...]
    causes: tuple[str, ...] = ()
    advice: str = ""
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no output is wrong."""
        return all(row.verdict != "wrong" for row in self.rows)

    def __str__(self) -> str:
        """The table, worst rows first when it is long, and the verdict."""
        table = as_text([_HEAD, *map(_cells, self._shown())])
        text = [textwrap.fill(x, 88, subsequent_indent="  ") for x in self._summary()]
        return "\n".join([table, *text])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = "<br>".join(html.escape(line) for line in self._summary())
        return f"{as_html(_HEAD, map(_cells, self._shown()))}<p>{text}</p>"

    def _shown(self) -> list[Row]:
        if len(self.rows) <= _SHOWN:
            return list(self.rows)
        worst_first = sorted(
            self.rows, key=lambda row: (_ORDER.index(row.verdict), -row.difference)
        )
        return worst_first[:_SHOWN]

    def _summary(self) -> list[str]:
        lines = []
        if len(self.rows) > _SHOWN:
            lines.append(f"... and {len(self.rows) - _SHOWN} more outputs")
        present = {row.verdict for row in self.rows}
        lines += [
            f"{name}: {text}" for name, text in _MEANING.items() if name in present
        ]
        causes = [f"likely cause: {text}" for text in self.causes]
        end = [self.advice] if self.advice else []
        return [*lines, *self.notes, self._verdict(), *causes, *end]

    def _verdict(self) -> str:
        few, many = self.devices
        counts = f"{few} and {many} devices"
        wrong = sum(row.verdict == "wrong" for row in self.rows)
        if wrong:
            return f"WRONG: {wrong} of {len(self.rows)} outputs differ between {counts}"
        rounded = [r.difference for r in self.rows if r.verdict == "rounding"]
        if not rounded:
            return f"same: {counts} give the same"
        worst = f"{max(rounded):.1e}"
        return f"same: {counts} give the same; differences up to {worst} are rounding"


def _cells(row: Row) -> tuple[str, str, str, str]:
    figure = "" if row.verdict in ("equal", "per device") else f"{row.difference:.1e}"
    return row.path, row.verdict, figure, row.note
