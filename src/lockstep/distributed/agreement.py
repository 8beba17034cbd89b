"""Host values that all processes must share: compared, and the odd process named."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.distributed import session


def agree(
    value: Any,
    group: tuple[int, ...],
    *,
    what: str,
    cure: str,
    show: Callable[[Any], str] = repr,
) -> None:
    """Raise on every process when the processes of a group hold different values.

    Args:
        value: this process's, anything JSON can hold.
        group: the processes to compare.
        what: what the value is, for messages.
        cure: what to do about a difference.
        show: the value in words.

    Raises:
        RuntimeError: names the odd process and both values.
    """
    values = session.exchange(value, group, what=what)
    if values is None:
        return
    odd, usual = odd_one(values)
    if odd is not None:
        raise RuntimeError(
            f"{what} differs between the processes: process {group[odd]} has "
            f"{show(values[odd])}, and process {group[usual]} has "
            f"{show(values[usual])}{_and_others(values, usual)}. {cure}"
        )


def odd_one(values: Sequence[Any]) -> tuple[int | None, int]:
    """The place of a value unlike most, and of one of the most.

    Of two that differ the later is the odd one.

    Example:
        >>> odd_one(["a", "b", "a"]), odd_one([1, 2]), odd_one([3, 3])
        ((1, 0), (1, 0), (None, 0))
    """
    counts = [sum(other == value for other in values) for value in values]
    usual = counts.index(max(counts))
    odd = next((i for i, v in enumerate(values) if v != values[usual]), None)
    return odd, usual


def digest(*parts: Any) -> str:
    """A short name for the bits of arrays, numbers and text.

    Example:
        >>> digest(np.zeros(2)) == digest(np.zeros(2)), digest(0.0) == digest(-0.0)
        (True, False)
    """
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape} ".encode())
            found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        else:
            found.update(f"{type(part).__name__} {part!r} ".encode())
    return found.hexdigest()


def _and_others(values: Sequence[Any], usual: int) -> str:
    others = sum(value == values[usual] for value in values) - 1
    return f" (as {others} others)" if others else ""
