"""The batches of one run in their order: epochs, steps, and the end of both."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep import sharding
from lockstep.data.prefetching import Prefetch, PrefetchIterator, prefetch
from lockstep.loop.contract import check_count


class Feed:
    """Placed batches for so many steps or epochs.

    Attributes:
        total: the number of steps, or `None` where it cannot be known beforehand.
        done: the number of batches given out.
    """

    def __init__(
        self, batches: Iterable[Any], step: Any, steps: int | None, epochs: int | None
    ) -> None:
        """Check what can be checked before a batch is read."""
        _check_amount(steps, epochs)
        self._step, self._dropped_before = step, step.dropped_rows
        self._kind = type(batches).__name__
        self._once = isinstance(batches, Iterator)
        self._steps = steps
        self._epochs = 1 if steps is None and epochs is None else epochs
        if self._once and (self._epochs or 1) > 1:
            raise ValueError(
                f"epochs={epochs}, and batches is an iterator ({self._kind}), which "
                "cannot start again: give a list, a loader or data.batches(...), or "
                "say steps="
            )
        self.total = steps or _length(batches, self._epochs)
        self.done = 0
        self._placed = self._place(batches, step)
        self._epochs_done = 0

    def __iter__(self) -> Generator[tuple[int, Any], None, None]:
        """Each batch with the number of its epoch, from 1."""
        for epoch in itertools.count(1):
            before = self.done
            with self._one_pass() as placed:
                for batch in placed:
                    self.done += 1
                    yield epoch, batch
                    if self.done == self._steps:
                        return
            if epoch == self._epochs or self._once or self.done == before:
                self._epochs_done = epoch - (self.done == before)
                return

    def check_complete(self) -> None:
        """Report batches that ended before the run did.

        Raises:
            ValueError: there was no batch at all.
            RuntimeError: there were fewer than asked for.
        """
        dropped = self._step.dropped_rows - self._dropped_before
        if self.done == 0 and dropped:
            raise ValueError(
                f"remainder='drop' left out all {dropped} rows, for every batch has "
                f"too few for the {self._step.mesh.size} devices: nothing was trained; "
                "use larger batches, or remainder='pad'"
            )
        if self.done == 0:
            used = "; an iterator is empty once it was read" if self._once else ""
            raise ValueError(
                f"batches ({self._kind}) held no batch{used}: nothing was trained"
            )
        wanted = f"steps={self._steps}" if self._steps else f"epochs={self._epochs}"
        if self.done != self._steps and self._epochs_done != self._epochs:
            raise RuntimeError(
                f"batches ({self._kind}) ended after {self.done} steps, before {wanted}"
                ", and cannot start again: give a list, a loader or data.batches(...), "
                f"or steps={self.done}. Nothing is lost: the state is trainer.state"
            )

    def _place(self, batches: Iterable[Any], step: Any) -> Any:
        if isinstance(batches, Prefetch | PrefetchIterator):
            return batches
        if isinstance(batches, list | tuple) and _lies_on(batches, step.mesh):
            return batches  # nothing to prepare, so no thread
        # Reading ahead must not take what a later run would train on.
        return prefetch(batches, step, limit=self._steps if self._once else None)

    def _one_pass(self) -> Any:
        if isinstance(self._placed, Prefetch):
            return closing(iter(self._placed))
        return nullcontext(self._placed)  # an iterator is closed by whoever made it


def together(
    batches: Iterable[tuple[int, Any]], count: int
) -> Iterator[tuple[int, list[Any]]]:
    """Batches in groups of `count`, fewer where an epoch ends.

    Example:
        >>> list(together([(1, "a"), (1, "b"), (1, "c"), (2, "a")], 2))
        [(1, ['a', 'b']), (1, ['c']), (2, ['a'])]
    """
    for epoch, same in itertools.groupby(batches, lambda pair: pair[0]):
        while group := [batch for _, batch in itertools.islice(same, count)]:
            yield epoch, group


def rows_of(batch: Any) -> int:
    """Rows of a placed global batch, padding included; 1 for a batch without rows."""
    for leaf in jax.tree.leaves(batch):
        if getattr(leaf, "ndim", 0):
            return leaf.shape[0]
    return 1


def _lies_on(batches: Sequence[Any], mesh: Mesh) -> bool:
    """Whether the first batch, and so most likely all, is on the devices already."""
    return bool(batches) and all(
        isinstance(leaf, jax.Array) and sharding.on_mesh(leaf, mesh)
        for leaf in jax.tree.leaves(batches[0])
    )


def _check_amount(steps: int | None, epochs: int | None) -> None:
    if steps is not None and epochs is not None:
        raise ValueError(
            f"steps={steps} and epochs={epochs}: give one of them, the other follows "
            "from the number of batches"
        )
    for name, count in (("steps", steps), ("epochs", epochs)):
        if count is not None:
            check_count(name, count)


def _length(batches: Any, epochs: int | None) -> int | None:
    try:
        return len(batches) * (epochs or 1)
    except (TypeError, NotImplementedError):
        return None
