"""Rows that can be asked for by number: a tree of arrays, or a source of elements."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from lockstep import tree
from lockstep.placement import check_batch, count_rows

_SAMPLE = 16


class RowSource(Protocol):
    """Gives any rows, in any order, as one batch.

    Attributes:
        threads: how many batches are worth reading at the same time.
    """

    threads: int

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray, epoch: int) -> Any:
        """The batch of `rows` (numbers from 0), a tree of `[len(rows), ...]`."""
        ...

    def sample(self) -> Any:
        """A few rows from everywhere, the same at each call; `None` if that is open."""
        ...


def row_source(source: Any) -> RowSource:
    """The rows of a tree of arrays, a Grain `MapDataset` or a sequence of elements.

    Raises:
        TypeError: `source` has no rows that can be asked for by number.
    """
    if tree.is_array(source) or isinstance(source, (Mapping, list, tuple)):
        return ArrayRows(source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return ElementRows(source)
    if isinstance(source, Iterable):
        raise TypeError(
            f"a {type(source).__name__} has no rows by number: give a tree of arrays, "
            "a Grain MapDataset, or an object with __len__ and __getitem__; a loader "
            "that yields batches by itself goes to prefetch or Trainer.fit as it is"
        )
    return ArrayRows(source)


class ArrayRows:
    """A tree of `[rows, ...]` arrays; memory-mapped files stay on disk."""

    threads = 0

    def __init__(self, arrays: Any) -> None:
        arrays = check_batch(arrays, "source")
        for path, leaf in tree.named_leaves(arrays, "source"):
            if tree.is_array(leaf) and not isinstance(leaf, (np.ndarray, jax.Array)):
                raise TypeError(
                    f"{path} is a {type(leaf).__name__}: give NumPy arrays (np.load("
                    "path, mmap_mode='r') reads lazily), or an object whose "
                    "__getitem__(i) returns one row"
                )
        self._rows = count_rows(arrays, "source")
        self._arrays = jax.tree.map(
            lambda x: np.asarray(x) if tree.is_array(x) else x, arrays
        )

    def __len__(self) -> int:
        return self._rows

    def take(self, rows: np.ndarray, epoch: int) -> Any:
        """One copy of the rows from each array."""
        return jax.tree.map(
            lambda x: np.take(x, rows, axis=0) if np.ndim(x) else x, self._arrays
        )

    def sample(self) -> Any:
        """So many rows at equal distances."""
        return self.take(np.linspace(0, len(self) - 1, _SAMPLE).astype(int), 0)


class ElementRows:
    """A source of single rows, such as images to decode, read in Grain's threads.

    A Grain `MapDataset` is asked for `epoch * len + row`, so that its random
    transforms draw anew in each epoch.
    """

    threads = 4

    def __init__(self, source: Any) -> None:
        import grain

        is_grain = isinstance(source, grain.MapDataset)
        self._elements = source if is_grain else grain.MapDataset.source(source)
        if len(self._elements) == sys.maxsize:
            raise ValueError(
                "this dataset repeats for ever: leave .repeat() out, the loop counts "
                "the epochs"
            )
        if not len(self._elements):
            raise ValueError("the source has 0 rows")

    def __len__(self) -> int:
        return len(self._elements)

    def take(self, rows: np.ndarray, epoch: int) -> Any:
        """The elements, stacked leaf by leaf."""
        offset = epoch * len(self)
        items = [self._elements[offset + row] for row in rows.tolist()]
        if any(item is None for item in items):
            row = rows[[item is None for item in items].index(True)]
            raise ValueError(
                f"row {row} of the source is None (a filter left it out?): rows are "
                "counted beforehand, so filter the indices that the source is made of"
            )
        items = jax.tree.map(lambda x: np.asarray(tree.as_host(x)), items)
        try:
            return jax.tree.map(lambda *leaves: np.stack(leaves), *items)
        except ValueError as error:
            raise _do_not_stack(items, rows) or error from error

    def sample(self) -> Any:
        """Nothing: elements may be made anew each time, with random changes."""
        return None


def _do_not_stack(items: list[Any], rows: np.ndarray) -> ValueError | None:
    for row, item in zip(rows.tolist(), items, strict=True):
        difference = tree.first_difference(items[0], item, "row")
        if difference:
            return ValueError(
                f"rows {rows[0]} and {row} of the source do not fit in one batch: "
                f"{difference}; pad or crop the elements to one shape"
            )
    return None
