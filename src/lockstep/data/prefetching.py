"""Batches that lie on the devices before the loop asks for them.

One worker thread pulls a batch, places it and hands it over, while the devices
compute on the batches before. It alone touches the source while it runs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from lockstep import sharding
from lockstep.data import loaders
from lockstep.data.counts import check_count
from lockstep.data.handover import Placed, Worker, state_of
from lockstep.data.passes import Pass, Place, SharedPass
from lockstep.distributed.session import group_of
from lockstep.placement import Layout, place_batch

_UNREAD = object()


def prefetch(
    batches: Iterable[Any],
    where: Any,
    *,
    size: int = 2,
    remainder: str | None = None,
    limit: int | None = None,
) -> "Prefetch":
    """Place batches ahead of the loop, in a thread.

    At most `size` batches lie ahead of the one that the loop holds, ready or in the
    making. Leaving the loop early, in whatever way, stops the thread and closes the
    source. An error in the source surfaces after the batches that came before it.

    Args:
        batches: process-local trees of `[B, ...]` arrays (NumPy, torch, TensorFlow).
            A re-iterable (a list, a `DataLoader`, `data.batches`) starts again with
            each loop; an iterator can be read once.
        where: a mesh, or the step that will use the batches, from `parallelize` or
            `per_device`: one from `make_train_step` goes through one of them first.
        size: how many batches to hold ahead, at least 1.
        remainder: what to do with rows that do not divide; `"error"` when `None`. It
            belongs to the step where there is one.
        limit: read at most this many batches in a pass, and then leave the source open,
            so that an iterator can be read on.

    Returns:
        An iterable of placed batches, with the same rows on 1 or N devices. Its
        iterators have `close()`, and `get_state()` and `set_state(state)` of the
        source, counted by the batches that the loop was given.

    Raises:
        ValueError: `size` or `limit` below 1, a `remainder` unlike the step's, or a
            torch `DataLoader` that forks its workers.
        TypeError: `batches` is a single batch, `where` is no place, or `size` or
            `limit` is no whole number.

    Example:
        >>> import lockstep as ls, numpy as np
        >>> mesh = ls.make_mesh()
        >>> host_batches = [{"x": np.ones((8, 3))}, {"x": np.zeros((8, 3))}]
        >>> [float(batch["x"].sum()) for batch in ls.prefetch(host_batches, mesh)]
        [24.0, 0.0]
    """
    check_count("size", size, ": prefetch holds at least 1 batch ahead")
    if limit is not None:
        check_count("limit", limit, ": a pass has at least 1 batch")
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            "prefetch needs an iterable of batches and got one "
            f"{type(batches).__name__}: give [batch] for a single batch, or "
            "data.batches(arrays, ...) to cut arrays into batches"
        )
    loaders.check_loader(batches)
    place, layout = _place_on(where, remainder)
    if loaders.has_workers(batches):
        place = loaders.refuse_jax_arrays(place)
    begin = partial(Pass, place)
    if layout is not None and len(group_of(layout.mesh)) > 1:
        own = remainder or getattr(where, "remainder", "error")
        begin = partial(SharedPass, place, layout, own)
    return Prefetch(batches, begin, size, limit)


def _place_on(where: Any, remainder: str | None) -> tuple[Place, Layout | None]:
    """The function that places one batch on a mesh, or as a step wants it."""
    if isinstance(where, Mesh):
        layout = Layout(where, sharding.row_axis(where))

        def place(batch: Any, **agreed: Any) -> Any:
            return place_batch(batch, layout, remainder or "error", **agreed)[0]

        return place, layout
    if not hasattr(where, "place_batch"):
        raise TypeError(
            f"prefetch(batches, where): where is a {type(where).__name__}; give a "
            "mesh, or the step that parallelize(...) or per_device(...) returned"
        )
    if remainder is not None and remainder != where.remainder:
        raise ValueError(
            f"prefetch got remainder={remainder!r} and the step has "
            f"remainder={where.remainder!r}: set it once, on the step"
        )
    return where.place_batch, getattr(where, "layout", None)


class Prefetch:
    """An iterable of placed batches, made by `prefetch`.

    Each loop over it runs its own thread, and first closes an unfinished one.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        begin: Callable[[], Pass],
        size: int,
        limit: int | None,
    ) -> None:
        self._batches = batches
        self._begin = begin
        self._start = partial(Worker, size=size, limit=limit)
        self._limit = limit
        self._current: Callable[[], PrefetchIterator | None] = lambda: None

    def __iter__(self) -> "PrefetchIterator":
        previous = self._current()
        if previous is not None:
            previous.supersede()
        source = iter(self._batches)
        if source is self._batches:
            self._batches = _ReadOnce()
        current = PrefetchIterator(source, self._begin, self._start)
        self._current = weakref.ref(current)
        return current

    def __len__(self) -> int:
        known = len(self._batches)  # pyright: ignore[reportArgumentType]
        return known if self._limit is None else min(known, self._limit)


class PrefetchIterator(Iterator[Any]):
    """One pass over the source: the loop's end of the hand-over.

    The thread starts with the first `next`.
    """

    def __init__(
        self,
        source: Iterator[Any],
        begin: Callable[[], Pass],
        start: Callable[[Iterator[Any], Pass], Worker],
    ) -> None:
        self._source = source
        self._begin = begin
        self._pass: Pass | None = None
        self._start = start
        self._worker: Worker | None = None
        self._stop: Callable[[], Any] | None = None
        self._state: Any = _UNREAD
        self._ended = self._superseded = False

    def __next__(self) -> Any:
        if self._superseded:
            raise RuntimeError(
                "a newer loop over the same prefetch object closed this one: call "
                "prefetch once for each loop that runs at the same time"
            )
        if self._ended:
            raise StopIteration
        item = self._running().take()
        if isinstance(item, Placed):
            self._state = item.state
            return self._pass.finish(item.batch) if self._pass else item.batch
        self.close()
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            del item  # the traceback holds this frame, and the frame the error

    def close(self) -> None:
        """Stop the thread and close the source; further batches are not given out."""
        self._ended = True
        if self._stop is not None:
            self._stop()
        elif hasattr(self._source, "close"):
            self._source.close()  # pyright: ignore[reportAttributeAccessIssue]

    def supersede(self) -> None:
        """Close for the sake of a newer pass, and let an older loop know."""
        self._superseded = not self._ended
        self.close()

    def get_state(self) -> Any:
        """The source's state after the last batch given out; `None` if it has none.

        Batches that were read ahead do not count.
        """
        return state_of(self._source) if self._state is _UNREAD else self._state

    def set_state(self, state: Any) -> None:
        """Put the source at a state of `get_state`, before the first batch is taken.

        Raises:
            RuntimeError: the thread already reads from the source.
            TypeError: the source has no `set_state`.
        """
        if self._worker is not None:
            raise RuntimeError(
                "set_state after the first batch: batches are already read ahead; "
                "call it on a fresh iter(...)"
            )
        if not hasattr(self._source, "set_state"):
            raise TypeError(
                f"the source, a {type(self._source).__name__}, has no set_state: use "
                "data.batches or a Grain dataset, whose position can be restored"
            )
        self._source.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def knows_its_place(self) -> bool:
        """Whether the source has `get_state` and `set_state`."""
        return all(hasattr(self._source, m) for m in ("get_state", "set_state"))

    def skip(self, count: int) -> None:
        """Read batches and leave them out, before the first one is taken.

        Raises:
            RuntimeError: the thread already reads from the source.
            ValueError: there are not so many.
        """
        if self._worker is not None:
            raise RuntimeError("skip after the first batch: call it on a fresh iter()")
        for done in range(count):
            if next(self._source, _UNREAD) is _UNREAD:
                raise ValueError(
                    f"the run had read {count} batches, and this "
                    f"{type(self._source).__name__} ends after {done}: give the same "
                    "batches to go on"
                )

    def _running(self) -> Worker:
        if self._worker is None:
            self._pass = self._begin()
            self._worker = self._start(self._source, self._pass)
            # The worker does not hold this object: a loop that is left drops the last
            # reference to it, and `finalize` then stops the thread (also at exit).
            self._stop = weakref.finalize(self, self._worker.stop)
        return self._worker


class _ReadOnce:
    """Stands for an iterator that was read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(
            "these batches came from an iterator, which can be read once: give "
            "prefetch a list, a loader or data.batches, which start again"
        )
