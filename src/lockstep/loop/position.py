"""Where the batches of a run stand: saved as JSON, and found again.

A source that knows its place (`get_state` and `set_state`: `data.batches`, Grain) is
asked for it. A list is as long as it was, so the number of batches is enough. Anything
else can only be read again from its start.
"""

import base64
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from lockstep.data.prefetching import PrefetchIterator
from lockstep.notices import say_once

_BYTES = "base64"
_AS_LONG_AS_IT_WAS = ("list", "tuple")


def encode(state: Any) -> Any:
    """A source's state as plain values for JSON.

    Raises:
        TypeError: it holds something that JSON cannot.

    Example:
        >>> encode({"next": np.int64(3), "raw": b"x"})
        {'next': 3, 'raw': {'base64': 'eA=='}}
    """
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, dict):
        if not all(isinstance(name, str) for name in state):
            raise TypeError(f"a position has names that are no text: {list(state)}")
        return {name: encode(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [encode(value) for value in state]
    if isinstance(state, (np.ndarray, np.generic)):
        return state.tolist()
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise TypeError(
        f"the position of the batches holds a {type(state).__name__}, which JSON cannot"
        " keep: let get_state() return numbers, text, bytes, lists and dicts"
    )


def decode(state: Any) -> Any:
    """The inverse of `encode`; tuples have become lists."""
    if isinstance(state, dict):
        if list(state) == [_BYTES]:
            return base64.b64decode(state[_BYTES])
        return {name: decode(value) for name, value in state.items()}
    return [decode(v) for v in state] if isinstance(state, list) else state


def check_kept(batches: Iterator[Any], kind: str) -> None:
    """Refuse a source whose position cannot be saved.

    Raises:
        ValueError: it has no `get_state` and `set_state`.
    """
    knows = not isinstance(batches, PrefetchIterator) or batches.knows_its_place
    if not knows and kind not in _AS_LONG_AS_IT_WAS:
        raise ValueError(
            f"these batches ({kind}) do not know their position, and strict=True wants "
            "a position in every checkpoint: use data.batches(...), a Grain dataset or "
            "a list, or leave strict out and let a resumed run read over what was used"
        )


def go_to(batches: Iterator[Any], position: dict[str, Any], kind: str) -> None:
    """Put an iterator that was not read from at a saved position.

    Raises:
        ValueError: it is another kind of source, or it ends before the position.
    """
    state, count = position["source"], position["batches"]
    knows = isinstance(batches, PrefetchIterator) and batches.knows_its_place
    if knows != (state is not None):
        raise ValueError(
            f"the checkpoint was made with batches ({position['kind']}) that "
            f"{'had no position' if knows else 'knew their position'}, and these "
            f"({kind}) are another kind: give the same batches to go on"
        )
    if isinstance(batches, PrefetchIterator) and knows:
        batches.set_state(decode(state))
    elif isinstance(batches, PrefetchIterator):
        if count and kind not in _AS_LONG_AS_IT_WAS:
            say_once(
                f"reads over {count} batches",
                f"these batches ({kind}) cannot say where they stand: {count} of them "
                "are read and left out, which is right if they come in the same order "
                "again; use data.batches(...) or a Grain dataset, and nothing is read "
                "twice",
            )
        batches.skip(count)
    else:
        next(itertools.islice(batches, count, count), None)
