"""Whole numbers of at least 1, as arguments: batches, steps, epochs."""

from numbers import Integral
from typing import Any


def check_count(name: str, count: Any, too_few: str, whole: str = "") -> None:
    """Refuse what is no whole number of at least 1.

    Args:
        name: of the argument.
        count: its value.
        too_few: what the message says of a number below 1, after it.
        whole: why it is a whole number, after the type of another one.

    Raises:
        TypeError: not a whole number.
        ValueError: below 1.
    """
    if isinstance(count, bool) or not isinstance(count, Integral):
        kind = type(count).__name__
        raise TypeError(f"{name}={count!r} is a {kind}{whole}: give an int")
    if count < 1:
        raise ValueError(f"{name}={count}{too_few}")
