"""Compiles that only another layout causes: equal shapes, other devices or splits.

`jax.jit` traces once for arguments of equal shapes and compiles again for each layout
of them, without a word.
"""

from collections.abc import Callable
from typing import Any

import jax


class Layouts:
    """The layouts that one program has met, for each set of shapes."""

    def __init__(self) -> None:
        """Nothing was met yet."""
        self._met: dict[Any, list[list[Any]]] = {}

    def change(self, leaves: list[Any], paths: Callable[[], list[str]]) -> str | None:
        """What lies otherwise than in the nearest known call; `None` if nothing does.

        The call is remembered. The first one of its shapes is no change.

        Args:
            leaves: the placed arrays of a call.
            paths: makes the path of each, which takes longer than the look at them.
        """
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", 0)) for x in leaves)
        known = self._met.setdefault(types, [])
        nearest, old = None, []
        for layout in known:
            moved = [
                i
                for i, (leaf, where) in enumerate(zip(leaves, layout, strict=True))
                if not _same(leaf, where)
            ]
            if not moved:
                return None
            if nearest is None or len(moved) < len(nearest):
                nearest, old = moved, layout
        known.append([leaf.sharding for leaf in leaves])
        if nearest is None:
            return None
        names = paths()
        texts = [
            f"{names[i]} {_describe(old[i])} -> {_describe(leaves[i].sharding)}"
            for i in nearest[:3]
        ]
        more = f" and {len(nearest) - 3} more" if len(nearest) > 3 else ""
        return f"equal shapes, but {', '.join(texts)}{more}"


def _same(leaf: jax.Array, where: Any) -> bool:
    own = leaf.sharding
    return own is where or own == where or own.is_equivalent_to(where, leaf.ndim)


def _describe(where: Any) -> str:
    """A layout in a few words: how it is split, or on which device it is."""
    spec = getattr(where, "spec", None)
    if spec is None:
        numbers = ", ".join(str(d.id) for d in sorted(where.device_set, key=_number))
        return f"on device {numbers}"
    return "whole on every device" if not any(spec) else f"split {spec}"


def _number(device: Any) -> int:
    return device.id
