"""Numbers from the host as further arguments: 0.1, `np.float32(0.1)` and 1 alike.

Each kind of number would be a program of its own. A number in a known place takes the
kind of the first one there, if it keeps its value.
"""

import numbers
from typing import Any

import numpy as np

from lockstep.placement import map_named
from lockstep.tree import named_leaves


class Scalars:
    """The kinds of the numbers that one step was given, by their place.

    Example:
        >>> scalars = Scalars()
        >>> scalars.alike(0.1, "lr"), scalars.alike(np.float32(0.5), "lr")
        (0.1, 0.5)
        >>> scalars.alike(1, "lr")
        1.0
    """

    def __init__(self) -> None:
        """No number was met yet."""
        self._kinds: dict[str, str] = {}

    def alike(self, argument: Any, name: str) -> Any:
        """The argument, each number in the kind that came first in its place."""
        leaves = [leaf for _, leaf in named_leaves(argument, name)]
        if not any(_kind(leaf) for leaf in leaves):
            return argument
        return map_named(self._number, argument, name)

    def _number(self, path: str, leaf: Any) -> Any:
        kind = _kind(leaf)
        if kind is None:
            return leaf
        first = self._kinds.setdefault(path, kind)
        return leaf if first == kind else _convert(leaf, first)


def _kind(leaf: Any) -> str | None:
    """`weak int` and `weak float` for Python's, else a dtype; `None`: no number."""
    if type(leaf) in (int, float):
        return f"weak {type(leaf).__name__}"
    is_number = isinstance(leaf, np.generic) and isinstance(leaf, numbers.Real)
    return leaf.dtype.name if is_number else None


def _convert(leaf: Any, kind: str) -> Any:
    """The number in another kind; itself if it is no such number."""
    if kind == "weak float":  # any real number is meant as one
        return float(leaf)
    whole = "int" in kind
    if whole and not isinstance(leaf, numbers.Integral):
        return leaf  # 1.0 beside 1: the results may have another dtype
    if kind == "weak int":
        return int(leaf)
    limits = np.iinfo(kind) if whole else None
    if limits and not limits.min <= int(leaf) <= limits.max:
        return leaf
    return np.dtype(kind).type(leaf)
