"""The report of `collectives`: a table, a total, a verdict, warnings."""

import dataclasses
import html
import os
import textwrap
from pathlib import Path

from lockstep.debug.communication.verdict import Verdict
from lockstep.tables import as_html, as_text

_HEAD = ("collective", "of", "along", "bytes", "rounds", "from")
# Bytes that each of n devices sends for a payload of 1 byte, when they form a ring
# (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
# workstations, J. Parallel Distrib. Comput. 69, 2009).
_SENT = {"all-reduce": 2.0, "collective-permute": 0.0}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled step.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "collective-permute", ...
        arrays: what is moved, as `float32[4,8]`; several in one tuple.
        axis: the mesh axis, or several, or "part of" one.
        devices: how many devices take part together.
        nbytes: the whole array on one device: what is reduced, or gathered.
        rounds: how often one step runs it.
        in_loop: whether it stands in a loop.
        rounds_known: whether the compiled text tells how often the loop runs; else
            it is counted once.
        source: `file:line (function)`, if the compiled text has it.
        operation: the operation of JAX that it came from, as `psum`.
    """

    kind: str
    arrays: tuple[str, ...]
    axis: str
    devices: int
    nbytes: int
    rounds: int = 1
    in_loop: bool = False
    rounds_known: bool = True
    source: str | None = None
    operation: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one step when the devices form a ring.

        Example:
            >>> Collective("all-reduce", ("float32[8]",), "data", 4, 32).sent_bytes
            48.0
        """
        if self.kind == "collective-permute":
            return float(self.nbytes * self.rounds)
        share = _SENT.get(self.kind, 1.0) * (self.devices - 1) / self.devices
        return share * self.nbytes * self.rounds

    @property
    def place(self) -> str:
        """The source line, short; or the operation, where the text has no line."""
        if self.source is None:
            return f"{self.operation} (no line in the compiled text)"
        path, _, rest = self.source.rpartition("/")
        try:
            short = os.path.relpath(path) if path else ""
        except ValueError:  # another drive
            short = path
        if short in ("", "."):
            return rest
        return f"{short if '..' not in short else Path(path).name}/{rest}"


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What a step sends between the devices.

    Attributes:
        rows: one for each collective of the compiled program.
        mesh: the axes with their sizes.
        verdict: whether all gradients are reduced; `None` in the global view, where
            the compiler sees to that.
        warnings: what is wrong or costly; empty for a healthy step.
        link_gb_per_s: the speed that `seconds` is computed for, 1e9 bytes a second.
    """

    rows: tuple[Collective, ...]
    mesh: dict[str, int]
    verdict: Verdict | None = None
    warnings: tuple[str, ...] = ()
    link_gb_per_s: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes reduced or gathered in one step, on each device."""
        return sum(row.nbytes * row.rounds for row in self.rows)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one step, in a ring."""
        return sum(row.sent_bytes for row in self.rows)

    @property
    def seconds(self) -> float | None:
        """Time on the links for one step, without latency and without overlap."""
        speed = self.link_gb_per_s
        return None if speed is None else self.sent_bytes / (speed * 1e9)

    def __str__(self) -> str:
        """The table, the total, the verdict and the warnings."""
        table = [as_text([_HEAD, *map(_cells, self.rows)])] if self.rows else []
        text = [textwrap.fill(x, 88, subsequent_indent="  ") for x in self._summary()]
        return "\n".join([*table, *text])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = "<br>".join(html.escape(line) for line in self._summary())
        return f"{as_html(_HEAD, map(_cells, self.rows))}<p>{text}</p>"

    def _summary(self) -> list[str]:
        lines = [self._total()]
        if self.verdict is not None:
            lines.append(str(self.verdict))
        return lines + [f"warning: {text}" for text in self.warnings]

    def _total(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        if not self.rows:
            return f"no collectives on {axes}"
        text = (
            f"one step on {axes}: {self.nbytes:,} bytes in {len(self.rows)} "
            f"collective{'s' * (len(self.rows) > 1)}; each device sends "
            f"{self.sent_bytes:,.0f} bytes in a ring"
        )
        if self.seconds is None:
            return text
        speed = f"{self.link_gb_per_s:g} GB/s"
        return f"{text}: {_time(self.seconds)} at {speed}, if nothing overlaps"


def _cells(row: Collective) -> tuple[str, ...]:
    more = f" and {len(row.arrays) - 2} more" if len(row.arrays) > 2 else ""
    rounds = f"{row.rounds} x in a loop" if row.in_loop else "1"
    if not row.rounds_known:
        rounds = "unknown (a loop)"
    return (
        row.kind,
        ", ".join(row.arrays[:2]) + more,
        f"{row.axis} ({row.devices})",
        f"{row.nbytes:,}",
        rounds,
        row.place,
    )


def _time(seconds: float) -> str:
    """As `1.5 ms`; three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
