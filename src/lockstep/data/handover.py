"""One thread makes items ahead of another, which may leave at any time."""

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from lockstep.data import loaders
from lockstep.data.passes import NOTHING, Pass
from lockstep.distributed.line import READS_AHEAD

_PATIENCE_S = 10.0  # for a source that is in the middle of a batch when it is left


class Placed(NamedTuple):
    """A batch on the devices, and the state of its source after it."""

    batch: Any
    state: Any


class Ended(NamedTuple):
    """The last item: the source is closed, with or without an error."""

    error: BaseException | None


class Worker:
    """A thread that pulls batches from `source` and places them, `size` ahead.

    It starts at once and alone touches the source. It closes the source where it ends,
    unless that is after `limit` batches, when somebody may want to read on.
    """

    def __init__(
        self,
        source: Iterator[Any],
        current: Pass,
        size: int,
        limit: int | None,
    ) -> None:
        self._channel = _Channel(size)
        self._thread = threading.Thread(
            target=_work,
            args=(source, current, self._channel, limit),
            # JAX's settings by context (`jax.enable_x64(True)`) hold for one thread.
            kwargs={"x64": jax.config.jax_enable_x64},
            name=READS_AHEAD,
            daemon=True,
        )
        self._thread.start()

    def take(self) -> Placed | Ended:
        """Wait for the next item; none follows an `Ended`."""
        return self._channel.take()

    def stop(self) -> None:
        """End the thread and drop what it made; waits for a batch in the making."""
        self._channel.close()
        if self._thread is threading.current_thread():  # the garbage collector ran here
            return
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            logging.getLogger("lockstep").warning(
                "the batch iterator has been busy with one batch for %.0f s since the "
                "loop was left; its thread ends with that batch",
                _PATIENCE_S,
            )
        del self._channel  # and the batches in it, which nobody will take


class _Channel:
    """A bounded queue that its reader may close, from a finalizer as well.

    Items go one way and room for items the other, both through queues that take no
    lock a finalizer could find taken.
    """

    def __init__(self, size: int) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(size):
            self._room.put(None)

    def is_closed(self) -> bool:
        """Whether the reader has left."""
        return self._closed

    def wait_for_room(self) -> bool:
        """Block until an item may be made; `False` once nobody wants one."""
        self._room.get()
        return not self._closed

    def return_room(self) -> None:
        """Give back room for which no item was made."""
        self._room.put(None)

    def put(self, item: Any) -> bool:
        """Hand over an item; `False` when the reader has left."""
        if not self._closed:
            self._items.put(item)
        return not self._closed

    def take(self) -> Any:
        item = self._items.get()
        self._room.put(None)
        return item

    def close(self) -> None:
        self._closed = True
        self._room.put(None)  # wakes the worker


def state_of(source: Any) -> Any:
    """The position of a source that knows it (`get_state`, as Grain's), or `None`."""
    return source.get_state() if hasattr(source, "get_state") else None


def _work(
    source: Iterator[Any],
    current: Pass,
    channel: _Channel,
    limit: int | None,
    *,
    x64: bool,
) -> None:
    error, open_end = None, False
    try:
        with jax.enable_x64(x64):
            open_end = _hand_over(source, current, channel, limit)
    except StopIteration as stop:  # from `place`: it must not look like the end
        error = RuntimeError("placing a batch raised StopIteration")
        error.__cause__ = stop
    except BaseException as raised:
        error = loaders.explain_jax_items(raised)
    try:
        if error is None:  # an error is told by the loop that it reaches
            current.leave()
        if hasattr(source, "close") and not open_end:
            source.close()  # pyright: ignore[reportAttributeAccessIssue]
    except BaseException as raised:
        error = error or raised
    if not channel.put(Ended(error)) and error is not None:
        logging.getLogger("lockstep").warning(
            "the batch iterator failed while the loop was being left", exc_info=error
        )


def _hand_over(
    source: Iterator[Any],
    current: Pass,
    channel: _Channel,
    limit: int | None,
) -> bool:
    """Work until the source, the reader or the limit ends it; was it the limit?"""
    handed = 0
    while handed != limit and channel.wait_for_room():
        placed = current.next(source, channel.is_closed)
        if placed is NOTHING:
            return False
        if placed is None:  # remainder="drop" may leave no row at all
            channel.return_room()
            continue
        channel.put(Placed(placed, state_of(source)))
        handed += 1
    return handed == limit
