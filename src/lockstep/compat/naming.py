"""What the table of names is made of: rows, and their kinds."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What became of a name."""

    REMOVED = "removed"
    """Part of the data-parallel interface; gone, with nothing of its shape in JAX."""
    RENAMED = "renamed"
    """Gone under this name; the same thing has another one."""
    CHANGED = "changed"
    """What stands there today, or comes nearest, means something else."""
    DEAD = "dead"
    """Gone, and nothing today means the same."""
    OLD = "old"
    """Still there and still right, but on its way out."""


@dataclass(frozen=True, slots=True)
class Name:
    """One row: a name, what became of it, and what to do.

    Attributes:
        old: the dotted name, as the era wrote it.
        kind: what became of it.
        today: what to write instead, as text.
        rename: the dotted name that can stand in its place without any other
            change; empty where there is none.
        restore: the dotted name of what `install` puts in its place; empty where it
            cannot, and then `today` is what the raised error says.
    """

    old: str
    kind: Kind
    today: str
    rename: str = ""
    restore: str = ""

    @property
    def gone(self) -> bool:
        """Whether code that uses the name stops on today's JAX."""
        return self.kind in (Kind.REMOVED, Kind.RENAMED, Kind.DEAD)


def renamed(names: str, module: str, to: str = "") -> Iterator[Name]:
    """Rows for `old` or `old=new` words under `module`, now under `to`."""
    for word in names.split():
        old, _, new = word.partition("=")
        rename = f"{to or module}.{new or old}"
        yield Name(f"{module}.{old}", Kind.RENAMED, rename, rename, rename)


def gone(kind: Kind, rows: dict[str, str], restore: str = "") -> Iterator[Name]:
    """Rows that have text only, or the same helper module for all of them."""
    for old, today in rows.items():
        yield Name(old, kind, today, "", restore and restore + old.split(".")[-1])
