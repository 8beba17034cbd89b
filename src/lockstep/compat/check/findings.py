"""What the checker says about one place."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Level(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The code stops on today's JAX."""
    WARNING = "warning"
    """The code runs, but not as it was meant, or not as fast."""
    NOTE = "note"
    """Nothing is wrong; something better can be done."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark of one rule.

    Attributes:
        rule: the rule's name, in words joined by hyphens.
        level: how much it matters.
        text: what is the matter, why, and what to do.
        line: counted from 1, in its file or, in a notebook, in its cell.
        column: counted from 1.
        cell: the code cell of a notebook, counted from 1; 0 in any other file.
        path: the file; the checker fills it in.
        file_line: the line in the file itself, which in a notebook is JSON.
    """

    rule: str
    level: Level
    text: str
    line: int
    column: int = 1
    cell: int = 0
    path: Path = Path()
    file_line: int = 0

    @property
    def place(self) -> str:
        """Where it is: `train.py:12:5`, or `guide.ipynb:cell 3:12:5`."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"
