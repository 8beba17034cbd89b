"""Batches from arrays or a Grain source, in an order that can be found again.

The order is a function of `(seed, epoch)` alone. Every process cuts the same global
batches from it and reads its own part of each, so a position is one number of global
rows, on whatever number of processes and devices.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lockstep.data.batch_plan import BatchPlan, plan_batches
from lockstep.data.prefetching import prefetch as prefetch  # part of this namespace
from lockstep.data.row_sources import RowSource, row_source

# The order of rows must not repeat what users draw from the same seed.
_ORDER = 0x6F72646572


def batches(
    source: Any,
    *,
    global_batch_size: int | None = None,
    per_device_batch_size: int | None = None,
    seed: int | None = None,
    epochs: int = 1,
    mesh: Mesh | None = None,
    remainder: str | None = None,
) -> "Batches":
    """Cut a data set into host batches; each process gets its rows of each.

    Each `iter(...)` is a new pass over the rows, and each pass has another order: the
    first is epoch 0, the next epoch 1. `print(data.plan)` says where the rows go.

    Args:
        source: the whole data set, on every process: a tree of arrays with equal rows
            (NumPy, memory-mapped, torch), or a Grain `MapDataset`, or any object with
            `__len__` and `__getitem__(i) -> row`, whose rows are read in 4 threads.
        global_batch_size: rows of a batch over all processes and devices.
        per_device_batch_size: rows on each device; exactly one of the two is given.
        seed: shuffles the rows by `(seed, epoch)`, holding 8 bytes a row; `None`
            keeps their order.
        epochs: how many epochs one pass has.
        mesh: the devices, for the plan; all of them when `None`. Rows are split over
            its axis `data`.
        remainder: what to do with the rows that fill no batch at an epoch's end:
            `None` yields them as one short batch, to be treated where it is placed;
            `"drop"` leaves them out (others in each epoch); `"error"` refuses.

    Returns:
        A re-iterable of process-local batches.

    Raises:
        ValueError: none or both sizes, or rows that do not divide.
        TypeError: the source has no rows that can be asked for by number.

    Example:
        >>> data = batches({"x": np.arange(20)}, global_batch_size=16)
        >>> print(data.plan)
        global 16 = 1 process x 8 devices x 2 rows
        >>> [len(batch["x"]) for batch in data]
        [16, 4]
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: a pass has at least 1 epoch")
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed}: a seed is an integer from 0, or None")
    plan = plan_batches(global_batch_size, per_device_batch_size, mesh)
    return Batches(row_source(source), plan, seed, epochs, remainder)


class Batches:
    """A data set in global batches, made by `batches`; each loop is the next pass.

    Attributes:
        plan: how a global batch lies on processes and devices.
        seed: the seed of the order, or `None`.
        epochs: epochs of one pass.
    """

    def __init__(
        self,
        rows: RowSource,
        plan: BatchPlan,
        seed: int | None,
        epochs: int,
        remainder: str | None,
    ) -> None:
        self.plan, self.seed, self.epochs = plan, seed, epochs
        self._rows = rows
        self._drop = _drops(remainder, len(rows), plan.global_rows)
        self._next_epoch = 0

    @property
    def rows(self) -> int:
        """Rows of the whole data set."""
        return len(self._rows)

    def __len__(self) -> int:
        return self.epochs * len(self.starts(0))

    def __iter__(self) -> "BatchIterator":
        first = self._next_epoch
        self._next_epoch += self.epochs
        return BatchIterator(self, first)

    def __repr__(self) -> str:
        return f"Batches({self.rows:,} rows, {len(self):,} batches, {self.plan})"

    def starts(self, row: int) -> range:
        """The first row of each batch of an epoch, from `row` on."""
        size = self.plan.global_rows
        return range(row, self.rows - (size - 1 if self._drop else 0), size)

    def reader(self, epoch: int, row: int) -> Any:
        """Grain's iterator over this process's part of each batch, from `row` on."""
        import grain

        order = self._order(epoch)

        def read(start: int) -> Any:
            stop = min(start + self.plan.global_rows, self.rows)
            part = self.plan.local(stop - start)
            first, last = start + part.start, start + part.stop
            numbers = np.arange(first, last) if order is None else order[first:last]
            return self._rows.take(numbers, epoch)

        threads = self._rows.threads
        return iter(
            grain.MapDataset.source(self.starts(row))
            .map(read)
            .to_iter_dataset(grain.ReadOptions(threads, prefetch_buffer_size=threads))
        )

    def sample(self) -> Any:
        """A few rows, the same at each call; see `RowSource`."""
        return self._rows.sample()

    def go_on_after(self, epoch: int) -> int:
        """The end of the pass that holds `epoch`; the next pass starts there."""
        self._next_epoch = (epoch // self.epochs + 1) * self.epochs
        return self._next_epoch

    def _order(self, epoch: int) -> np.ndarray | None:
        if self.seed is None:
            return None
        return np.random.default_rng([_ORDER, self.seed, epoch]).permutation(self.rows)


class BatchIterator(Iterator[Any]):
    """One pass over `Batches`, whose position can be kept and restored."""

    def __init__(self, data: Batches, epoch: int) -> None:
        self._data = data
        self._end = epoch + data.epochs
        self._epoch, self._row = epoch, 0
        self._reader: Any = None
        self.last_rows = 0  # of all processes, in the batch given out last

    def __next__(self) -> Any:
        while not self._data.starts(self._row):
            self.close()
            if self._epoch + 1 == self._end:
                raise StopIteration
            self._epoch, self._row = self._epoch + 1, 0
        if self._reader is None:
            self._reader = self._data.reader(self._epoch, self._row)
        batch = next(self._reader)
        row = min(self._row + self._data.plan.global_rows, self._data.rows)
        self.last_rows, self._row = row - self._row, row
        return batch

    def course(self) -> list[Any]:
        """What decides all further batches; for JSON.

        Processes with the same course read parts of the same global batches, and need
        not ask each other how many rows the next one has.
        """
        return [repr(self._data), self.get_state(), f"until epoch {self._end}"]

    def sample(self) -> Any:
        """A few rows of the whole data, to compare; `None` if they may be random."""
        return self._data.sample()

    def close(self) -> None:
        """Stop Grain's threads; a further `next` would go on from the position."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def get_state(self) -> dict[str, Any]:
        """The position, for JSON: `row` counts the global rows given in `epoch`."""
        return {
            "epoch": self._epoch,
            "row": self._row,
            "rows": self._data.rows,
            "seed": self._data.seed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position, also with other batch sizes, processes or devices.

        Raises:
            ValueError: the position belongs to other rows or another order.
        """
        here = self.get_state()
        for name in ("rows", "seed"):
            if state[name] != here[name]:
                raise ValueError(
                    f"the saved position is of data with {name}={state[name]}, and "
                    f"this data has {name}={here[name]}: another order of rows cannot "
                    "be continued"
                )
        self.close()
        self._epoch, self._row = state["epoch"], state["row"]
        self._end = self._data.go_on_after(self._epoch)


def _drops(remainder: str | None, rows: int, size: int) -> bool:
    """Whether short batches are left out; refuses what `remainder` refuses."""
    if remainder not in (None, "drop", "error"):
        raise ValueError(
            f"remainder={remainder!r}: batches can only 'drop' a short last batch or "
            "refuse it ('error'); 'pad' and 'unsplit' happen where a batch is placed: "
            "give them to parallelize, per_device or prefetch"
        )
    left = rows % size
    if left and remainder == "error":
        raise ValueError(
            f"{rows} rows make {rows // size} batches of {size} and leave {left} rows: "
            f"use a batch size that divides {rows}, or remainder='drop' or None"
        )
    if remainder == "drop" and rows < size:
        raise ValueError(
            f"{rows} rows do not fill one batch of {size}, and remainder='drop' would "
            "leave nothing"
        )
    return remainder == "drop"
