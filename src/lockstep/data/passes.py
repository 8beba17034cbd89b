"""One pass over a source, in step with the same pass on the other processes.

Before a batch is placed, all processes agree on its rows, or on the end: a process
with fewer batches would leave the others waiting in a step for ever. This happens in
the thread that reads ahead, so the loop does not wait for it.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from lockstep import tree
from lockstep.distributed import session
from lockstep.distributed.agreement import odd_one
from lockstep.notices import say_once
from lockstep.placement import Layout, Unplaced, agree_on_rows
from lockstep.placement.row_shares import Ended, Shares, shards_of

NOTHING = object()
_GOES_ON = ("pad", "unsplit")  # a batch without a row is exact

Place = Callable[..., Any]


class Pass:
    """The pass of a process that runs alone: the next batch, placed."""

    def __init__(self, place: Place) -> None:
        """`place` puts a batch on the devices."""
        self.place = place

    def next(self, source: Iterator[Any], cancelled: Callable[[], bool]) -> Any:
        """The next batch placed, `None` if no row was left of it, or `NOTHING`."""
        batch = next(source, NOTHING)
        return batch if batch is NOTHING else self.place(batch)

    def finish(self, placed: Any) -> Any:
        """In the main thread: what could not be done beside it."""
        return placed

    def leave(self) -> None:
        """No more batches are taken."""


class SharedPass(Pass):
    """The pass of a process among several."""

    def __init__(self, place: Place, layout: Layout, remainder: str) -> None:
        """Made in the main thread: passes are numbered alike on all processes."""
        super().__init__(place)
        self._layout, self._remainder = layout, remainder
        self._group = session.group_of(layout.mesh)
        self._line = session.line()
        self._channel = session.new_channel("pass", self._group)
        self._taken, self._last = 0, None
        self._is_planned = False
        settings = session.current()
        self._compares = settings is not None and settings.check_data
        self._is_over = False

    def next(self, source: Iterator[Any], cancelled: Callable[[], bool]) -> Any:
        """As for one process; a process without a batch fills up or ends the pass."""
        if self._is_planned:
            batch = next(source, NOTHING)
            if batch is NOTHING:
                return NOTHING
            shares = self._planned_shares(source)
            return self.place(batch, shares=shares, ahead=True)
        batch = NOTHING if self._is_over else next(source, NOTHING)
        note: dict[str, Any] = {}
        if batch is NOTHING:
            self._is_over = True
            note["ended"] = self._taken
            batch = Ended(self._last)
        else:
            if self._taken == 0:
                note = self._about_first(source, batch)
            self._last, self._taken = batch, self._taken + 1
        shares = agree_on_rows(
            batch,
            self._layout,
            note=note,
            channel=self._channel,
            cancelled=cancelled,
        )
        if shares is None or not self._goes_on(shares):
            return NOTHING
        if self._taken == 1:
            _compare_first_batches(shares, self._layout)
            self._is_planned = self._have_one_course(shares, source)
        return self.place(batch, shares=shares, ahead=True)

    def finish(self, placed: Any) -> Any:
        """Gather what is to lie whole on every device."""
        if isinstance(placed, Unplaced):
            return placed.place(self._layout)
        return placed

    def leave(self) -> None:
        """Let the others know, who may wait for this process's next rows."""
        self._line.leave(self._channel, self._group)

    def _about_first(self, source: Iterator[Any], batch: Any) -> dict[str, Any]:
        note: dict[str, Any] = {"first": _digest(batch)} if self._compares else {}
        if hasattr(source, "course"):
            note["course"] = self._course_of(source)
        return note

    def _course_of(self, source: Any) -> list[Any]:
        """What decides the batches of `data.batches`, and a sign of the data itself."""
        rows = source.sample() if self._compares else None
        sign = [] if rows is None else [f"rows with the digest {_digest(rows)}"]
        return [*source.course(), *sign]

    def _have_one_course(self, shares: Shares, source: Iterator[Any]) -> bool:
        """Whether all processes read parts of the same batches, to the end.

        Raises:
            ValueError: they have `data.batches` of other rows or in another order.
        """
        courses = [note.get("course") for note in shares.notes]
        if None in courses:
            return False
        odd, usual = odd_one(courses)
        if odd is not None:
            a, b = ((shares.processes[i], courses[i]) for i in (odd, usual))
            raise ValueError(
                f"data.batches differs between the processes: process {a[0]} has "
                f"{a[1]}, process {b[0]} has {b[1]}. It gives each process its part of "
                "the same global batches: give it the same data, sizes and seed "
                "everywhere"
            )
        return self._planned_shares(source).counts == shares.counts

    def _planned_shares(self, source: Any) -> Shares:
        """What `BatchPlan.local` gives to each process."""
        layout, rows = self._layout, source.last_rows
        total = layout.mesh.shape[layout.axis_name]
        held = [shards_of(layout.mesh, layout.axis_name, p) for p in self._group]
        counts = (
            rows * (shards[-1] + 1) // total - rows * shards[0] // total
            for shards in held
        )
        return Shares(self._group, tuple(counts), len(held[0]), total)

    def _goes_on(self, shares: Shares) -> bool:
        """Whether there is another batch for all.

        Raises:
            ValueError: a process had no batch at all, and others have.
        """
        ended = {
            process: note["ended"]
            for process, note in zip(shares.processes, shares.notes, strict=True)
            if "ended" in note
        }
        if len(ended) in (0, len(shares.processes)):
            return not ended
        process, count = min(ended.items(), key=lambda item: item[1])
        others = next(p for p in shares.processes if p not in ended)
        if count == 0:
            raise ValueError(
                f"process {process} has no batch, and process {others} has: every "
                "process needs rows of its own (is its part of the data empty?)"
            )
        if self._remainder in _GOES_ON:
            return True
        logging.getLogger("lockstep").warning(
            "process %d came to the end of its batches after %d, and process %d has "
            "more: all stop here, and those are left out (remainder='pad' goes on with "
            "batches that have no row on process %d)",
            process,
            count,
            others,
            process,
        )
        return False


def _compare_first_batches(shares: Shares, layout: Layout) -> None:
    """Two processes read the same rows if they hold the same part, and only then.

    Raises:
        ValueError: they hold the same part of a batch, and read other rows.
    """
    first = [note.get("first") for note in shares.notes]
    if None in first:
        return
    parts = [shards_of(layout.mesh, layout.axis_name, p) for p in shares.processes]
    for i, process in enumerate(shares.processes):
        for j in range(i):
            other, same = shares.processes[j], first[i] == first[j]
            if parts[i] == parts[j] and not same:
                raise ValueError(
                    f"processes {other} and {process} hold the same part of a batch, "
                    "on different devices, and their first batches differ: give both "
                    "the same rows (data.batches does it)"
                )
            if parts[i] != parts[j] and same:
                say_once(
                    "equal first batches",
                    f"processes {other} and {process} have the same first batch: each "
                    "must read rows of its own (by jax.process_index(), or with "
                    "data.batches, which does it), or they count twice",
                )


def _digest(batch: Any) -> str:
    """A short name for the values of a batch; equal for equal batches."""
    found = hashlib.blake2b(digest_size=12)
    for path, leaf in tree.named_leaves(batch, "batch"):
        leaf = tree.as_host(leaf)
        if tree.is_array(leaf) and not isinstance(leaf, jax.Array):
            found.update(path.encode())
            found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()
