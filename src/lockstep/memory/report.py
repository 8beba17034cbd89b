"""The report on a step's memory: what it needs, what takes most, what would save."""

import dataclasses
import html
import textwrap

from lockstep.memory.choices import (
    Choice,
    Leaf,
    find_choices,
    missed_donation,
    state_bytes,
    state_leaves,
)
from lockstep.memory.plan import Plan
from lockstep.memory.usage import Usage, in_units, measure

_SHOWN_LEAVES = 5
_ACTIONS = 3


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What one step needs on each device.

    Attributes:
        usage: the bytes, by kind.
        devices: over how many devices the rows are split.
        rows: rows of one call, on all devices.
        state: bytes of the state on each device.
        leaves: the leaves of the state that splitting would save most on.
        choices: what would save memory, the largest saving first.
        warnings: what is wrong; empty for a healthy step.
    """

    usage: Usage
    devices: int
    rows: int
    state: int
    leaves: tuple[Leaf, ...]
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes that have to be free on each device."""
        return self.usage.peak

    @property
    def actions(self) -> tuple[str, ...]:
        """The three choices that save most, in words."""
        return tuple(
            f"{c.name}: saves {_amount(c)} a device; the cost: {c.cost}"
            for c in self.choices[:_ACTIONS]
        )

    def __str__(self) -> str:
        """The bytes, the largest leaves, and the choices."""
        lines = [*_table(self._amounts()), *self._leaf_lines()]
        if self.choices:
            rows = [(f"  {_amount(c)}", c.name) for c in self.choices]
            lines += ["to need less on each device, this saves:", *_table(rows, False)]
        lines += [f"warning: {text}" for text in self.warnings]
        wrapped = [
            textwrap.fill(line, 88, subsequent_indent="  ") if len(line) > 88 else line
            for line in lines
        ]
        return "\n".join(wrapped)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _amounts(self) -> list[tuple[str, str]]:
        u = self.usage
        batch = u.arguments - self.state
        return [
            (f"one step of {self.rows} rows, on each device", in_units(self.peak)),
            ("  state", in_units(self.state)),
            ("  batch and other arguments", in_units(max(batch, 0))),
            ("  outputs", in_units(u.outputs)),
            ("  of them in donated memory", f"-{in_units(u.reused)}"),
            ("  temporaries", in_units(u.temporaries)),
        ]

    def _leaf_lines(self) -> list[str]:
        leaves = [leaf for leaf in self.leaves if leaf.saves]
        if not leaves:
            return []
        rows = [
            (f"  {x.path}", f"{in_units(x.nbytes)}, saves {in_units(x.saves)}")
            for x in leaves
        ]
        head = f"whole on every device; split over {self.devices}, first:"
        return [head, *_table(rows, False)]


def examine(plan: Plan, *, compiling: bool = True) -> MemoryReport:
    """Compile a call and report its memory.

    Args:
        plan: the call.
        compiling: whether to compile variants too; else their savings are bounds.
    """
    lowered = plan.lower()
    usage = measure(lowered.compile())
    missed = missed_donation(plan, usage, lowered.out_info)
    return MemoryReport(
        usage=usage,
        devices=plan.devices,
        rows=plan.rows,
        state=state_bytes(plan),
        leaves=tuple(state_leaves(plan)[:_SHOWN_LEAVES]),
        choices=tuple(find_choices(plan, usage, missed, compiling=compiling)),
        warnings=tuple(_warnings(usage, state_bytes(plan), missed)),
    )


def _warnings(usage: Usage, state: int, missed: int) -> list[str]:
    # Scalars may be padded or shared; what matters is a large part of the state.
    if missed <= state // 100:
        return []
    if usage.reused == 0:
        return [
            f"nothing is donated: the old and the new state, {in_units(state)} each, "
            "lie side by side. Leave donate_argnums at its default, or name the state"
        ]
    return [
        f"donation reuses {in_units(usage.reused)} of the state's {in_units(state)}: "
        "a leaf comes back with another layout or sharding"
    ]


def _amount(choice: Choice) -> str:
    amount = in_units(choice.saves)
    if choice.how == "at most":
        return f"at most {amount}"
    return f"{amount} ({choice.how})"


def _table(rows: list[tuple[str, str]], right: bool = True) -> list[str]:
    left_width = max(len(a) for a, _ in rows)
    right_width = max(len(b) for _, b in rows) if right else 0
    return [f"{a.ljust(left_width)}  {b.rjust(right_width)}" for a, b in rows]
