"""The batches of one run in their order: epochs, steps, and the end of both."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep import sharding
from lockstep.data.prefetching import Prefetch, PrefetchIterator, prefetch
from lockstep.distributed.session import group_of
from lockstep.loop import position
from lockstep.loop.batch_rows import BatchRows
from lockstep.loop.contract import check_count


class Feed:
    """Placed batches for so many steps or epochs, in groups that run as one call.

    Attributes:
        total: the number of steps, or `None` where it cannot be known beforehand.
        done: the number of batches given out, those before a resume included.
        rows: how many rows the batches have.
        kind: what the batches are, for messages.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        step: Any,
        steps: int | None,
        epochs: int | None,
        *,
        at_a_time: int = 1,
        strict: bool = False,
    ) -> None:
        """Check what can be checked before a batch is read."""
        _check_amount(steps, epochs)
        self._batches, self._at_a_time, self._strict = batches, at_a_time, strict
        self._step, self._dropped_before = step, step.dropped_rows
        self.kind = type(batches).__name__
        self._once = isinstance(batches, Iterator)
        self._steps = steps
        self._epochs = 1 if steps is None and epochs is None else epochs
        if self._once and (self._epochs or 1) > 1:
            raise ValueError(
                f"epochs={epochs}, and batches is an iterator ({self.kind}), which "
                "cannot start again: give a list, a loader or data.batches(...), or "
                "say steps="
            )
        self.total = steps or _length(batches, self._epochs)
        self.rows = BatchRows(batches, step.remainder)
        self.done = 0
        self._epoch, self._in_epoch, self._epochs_done = 1, 0, 0
        self._start: dict[str, Any] | None = None
        self._current: Any = None
        self._failure: Exception | None = None
        self._placed = self._place(batches, step)

    def __iter__(self) -> Generator[tuple[int, list[Any]], None, None]:
        """Groups of batches with the number of their epoch, from 1."""
        while not self.is_complete:
            with self._one_pass() as placed:
                self._current = iter(placed)
                self._find_start()
                while group := self._next_group():
                    yield self._epoch, group
                if self.is_complete:
                    return
            is_empty = self._in_epoch == 0
            self._epochs_done = self._epoch - is_empty
            if self._epochs_done == self._epochs or self._once or is_empty:
                return
            self._epoch, self._in_epoch = self._epoch + 1, 0

    @property
    def epoch_rows(self) -> int | None:
        """Rows of the data set, where the batches know it."""
        rows = getattr(self._batches, "rows", None)
        return rows if isinstance(rows, int) else None

    @property
    def is_complete(self) -> bool:
        """Whether it is known that no batch is left."""
        steps_done = self._steps is not None and self.done >= self._steps
        return steps_done or (self._epochs is not None and self._epoch > self._epochs)

    def position(self) -> dict[str, Any]:
        """Where the batches stand after the last group given out; values for JSON."""
        known = isinstance(self._current, PrefetchIterator)
        state = self._current.get_state() if known else None
        return {
            "steps": self.done,
            "epoch": self._epoch,
            "batches": self._in_epoch,
            "rows": self.rows.most,
            "source": position.encode(state),
            "kind": self.kind,
        }

    def go_to(self, place: dict[str, Any]) -> None:
        """Begin at a position of an earlier run instead of at the start."""
        self.done = place["steps"]
        self._epoch, self._in_epoch = place["epoch"], place["batches"]
        self._start = place
        if not self.is_complete:
            self._placed = self._place(self._batches, self._step)

    def skip(self) -> None:
        """Give out nothing: an earlier run has used all batches, and more."""
        self._steps = self.done = self.total or 1

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
                f"batches ({self.kind}) held no batch{used}: nothing was trained"
            )
        wanted = f"steps={self._steps}" if self._steps else f"epochs={self._epochs}"
        if not self.is_complete and self._epochs_done != self._epochs:
            raise RuntimeError(
                f"batches ({self.kind}) ended after {self.done} steps, before {wanted}"
                ", and cannot start again: give a list, a loader or data.batches(...), "
                f"or steps={self.done}. Nothing is lost: the state is trainer.state"
            )

    def _place(self, batches: Iterable[Any], step: Any) -> Any:
        if isinstance(batches, Prefetch | PrefetchIterator):
            return batches
        if isinstance(batches, list | tuple) and _lies_on(batches, step.mesh):
            return batches  # nothing to prepare, so no thread
        # Reading ahead must not take what a later run would train on.
        limit = self._steps - self.done if self._once and self._steps else None
        return prefetch(batches, step, limit=limit)

    def _one_pass(self) -> Any:
        if isinstance(self._placed, Prefetch):
            return closing(iter(self._placed))
        return nullcontext(self._placed)  # an iterator is closed by whoever made it

    def _find_start(self) -> None:
        """Put the pass that begins at the position of an earlier run."""
        if self._strict:
            position.check_kept(self._current, self.kind)
        if self._start is not None:
            position.go_to(self._current, self._start, self.kind)
            self._start = None

    def _next_group(self) -> list[Any]:
        """The batches of the next call; none at the end of the epoch or of the run."""
        room = self._at_a_time
        if self._steps is not None:
            room = min(room, self._steps - self.done)
        group = self._read(room)
        self.rows.see(group, starts_epoch=self._in_epoch == 0)
        self.done += len(group)
        self._in_epoch += len(group)
        return group

    def _read(self, room: int) -> list[Any]:
        """Up to so many batches; those before an error come first, then the error."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        group = []
        try:
            for batch in itertools.islice(self._current, room):
                group.append(batch)
        except Exception as error:
            # Other processes may hold a full call: they would not run these steps.
            if not group or len(group_of(self._step.mesh)) > 1:
                raise
            self._failure = error
        return group


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
