"""The grid: its cells, which of them hold, and a few that cover all pairs."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from equivalence.models import TASKS

# Rows that meet in the forward pass: a filling row would be seen by the others.
MEETING = ("linen", "contrastive")
# The key of a step is folded with the device's number in the device view.
DRAWING = ("linen", "haiku")


class Cell(NamedTuple):
    """One training run; its levels, joined, are the name of a test."""

    task: str
    devices: int | str
    view: str
    accumulate: int
    batch: str
    precision: str

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def holds(self) -> bool:
        """Whether the design promises what one device gives."""
        return self.batch == "full" or self.task not in MEETING

    @property
    def reference(self) -> "Cell":
        """The same run on one device; many cells share it."""
        view = self.view if self.task in DRAWING else "global"
        return self._replace(devices=1, view=view)


FACTORS: dict[str, tuple[Any, ...]] = {
    "task": tuple(TASKS),
    "devices": (1, 2, 4, 8, "4x2"),  # 4x2: an axis "model" beside the axis "data"
    "view": ("global", "device"),
    "accumulate": (1, 4),
    "batch": ("full", "ragged", "one"),
    "precision": ("f32", "bf16", "f64"),
}


def all_cells() -> list[Cell]:
    """Every cell that holds."""
    cells = itertools.starmap(Cell, itertools.product(*FACTORS.values()))
    return [cell for cell in cells if cell.holds]


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """A few cells in which every pair of levels occurs that occurs in all of them.

    Greedy: next is the cell with the most new pairs; among equals one whose reference
    is needed already, then the one whose levels were used least, then the first.
    """
    pairs_of = {cell: set(pairs(cell)) for cell in cells}
    missing = set().union(*pairs_of.values())
    uses: Counter[Any] = Counter()
    chosen: list[Cell] = []

    def gain(cell: Cell) -> tuple[int, bool, int]:
        new = len(pairs_of[cell] & missing)
        known = any(cell.reference == other.reference for other in chosen)
        return new, known, -sum(uses[level] for level in enumerate(cell))

    while missing:
        best = max(pairs_of, key=gain)
        missing -= pairs_of[best]
        uses.update(enumerate(best))
        chosen.append(best)
    return chosen


def pairs(cell: Cell) -> Iterable[Any]:
    """All pairs of levels, each level with the number of its factor."""
    return itertools.combinations(enumerate(cell), 2)
