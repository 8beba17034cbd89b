"""The leaves of one call: which axis of each is mapped, and do they agree?"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from lockstep.compat.moves import Moves
from lockstep.compat.options import Options


@dataclass(frozen=True)
class MappedLeaves:
    """The leaves of one signature: their axes, and their names for messages."""

    fun: Callable[[], Callable[..., Any]]
    options: Options
    tree: PyTreeDef
    axes: tuple[int | None, ...]
    moves: Moves

    def first(self) -> int:
        """The position of the first leaf that is mapped."""
        for position, axis in enumerate(self.axes):
            if axis is not None:
                return position
        raise ValueError("pmap requires at least one argument with a mapped axis.")

    def size(self, leaves: Sequence[Any], devices: int) -> int:
        """The size that all mapped axes share.

        Args:
            leaves: the leaves of the arguments.
            devices: how many devices this process would map over.

        Raises:
            ValueError: they do not share one; says which leaves differ.
        """
        found = Counter(
            size
            for leaf, axis in zip(leaves, self.axes, strict=True)
            if axis is not None and (size := _axis_size(leaf, axis)) is not None
        )
        expected = (
            devices if devices in found or not found else max(found, key=found.get)
        )
        self.check(leaves, expected)
        return expected

    def check(self, leaves: Sequence[Any], expected: int) -> None:
        """Raises unless every mapped axis has the expected size."""
        wrong = [
            position
            for position, (leaf, axis) in enumerate(zip(leaves, self.axes, strict=True))
            if axis is not None and _axis_size(leaf, axis) != expected
        ]
        if wrong:
            self._refuse(leaves, wrong, expected)

    def _refuse(
        self, leaves: Sequence[Any], wrong: list[int], expected: int
    ) -> NoReturn:
        names = self.names()
        lines, ways_out = [], []
        for position in wrong:
            line, way_out = _complaint(leaves[position], self.axes[position], expected)
            lines.append(f"{names[position]}: {line}")
            ways_out.append(way_out)
        shown = lines[:10] + [f"and {len(lines) - 10} more"] * (len(lines) > 10)
        raise ValueError(
            f"pmap({self.function_name()}) maps over {expected} devices, and {len(wrong)} of "
            f"{len(leaves)} leaves cannot be split so:\n  "
            + "\n  ".join(shown)
            + "".join(f"\n{way_out}" for way_out in dict.fromkeys(ways_out))
        )

    def function_name(self) -> str:
        """The name of the function, for messages and profiles."""
        return getattr(self.fun(), "__name__", type(self.fun()).__name__)

    def names(self) -> list[str]:
        """The path of every leaf, from the function's own argument names."""
        args, kwargs = jax.tree.unflatten(self.tree, range(len(self.axes)))
        positional = _parameter_names(self.fun(), len(args) + len(self.options.static))
        positional = [
            name for i, name in enumerate(positional) if i not in self.options.static
        ]
        named = [*zip(positional, args, strict=True), *kwargs.items()]
        return [
            name + keystr(path)
            for name, tree in named
            for path, _ in tree_flatten_with_path(tree)[0]
        ]


_UNREPLICATED = (
    "These look un-replicated: pass them through lockstep.compat.replicate() once, or "
    "give in_axes=None to an argument that all devices share."
)
_KEY = (
    "One PRNG key is no key a device: split it with lockstep.compat.shard_prng_key(key), "
    "or give it in_axes=None if all devices shall draw the same numbers."
)
_SCALAR = (
    "A scalar has no axis to split: give it in_axes=None, mark it static with "
    "static_broadcasted_argnums, or pass it through lockstep.compat.replicate()."
)


def _complaint(leaf: Any, axis: int | None, expected: int) -> tuple[str, str]:
    """What is wrong with one leaf, and the way out."""
    if _is_one_key(leaf):
        return f"{_kind(leaf)} is one PRNG key, expected {expected} keys", _KEY
    if not np.ndim(leaf):
        return f"{_kind(leaf)} has rank 0 and cannot be split", _SCALAR
    size = _axis_size(leaf, axis or 0)
    if size is None:
        rank = len(leaf.shape)
        return f"{_kind(leaf)} has rank {rank}, and in_axes={axis}", _UNREPLICATED
    place = "leading axis" if axis == 0 else f"axis {axis}"
    return f"{place} {size}, expected {expected} (devices)", _UNREPLICATED


def _is_one_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return False
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return not leaf.shape
    return dtype == np.uint32 and leaf.shape in ((2,), (4,))


def _kind(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"the {type(leaf).__name__} {leaf!r}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _axis_size(leaf: Any, axis: int) -> int | None:
    shape = getattr(leaf, "shape", ())
    return shape[axis] if axis < len(shape) else None


def _parameter_names(fun: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # no signature, as for some built-in functions
        return [f"args[{i}]" for i in range(count)]
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]
