"""The leaves of one call: which axis of each is mapped, and do they agree?"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from lockstep.compat.mapping import devices
from lockstep.compat.mapping.options import Options
from lockstep.tree import describe_leaf, named_leaves


@dataclass(frozen=True)
class MappedLeaves:
    """The leaves of one signature: their axes, and their names for messages."""

    fun: Callable[[], Callable[..., Any]]
    options: Options
    tree: PyTreeDef
    axes: tuple[int | None, ...]

    def first(self) -> int:
        """The position of the first leaf that is mapped."""
        for position, axis in enumerate(self.axes):
            if axis is not None:
                return position
        raise ValueError("pmap requires at least one argument with a mapped axis.")

    def size(self, leaves: Sequence[Any]) -> int:
        """The size that all mapped axes share.

        Raises:
            ValueError: they do not share one; says which leaves differ.
        """
        pairs = zip(leaves, self.axes, strict=True)
        sizes = [_axis_size(leaf, axis) for leaf, axis in pairs if axis is not None]
        found = Counter(size for size in sizes if size is not None)
        present = len(devices.mine(self.options))
        if found and present not in found:
            size = found.most_common(1)[0][0]
        else:
            size = present
        if wrong := self._others(leaves, size, range(len(leaves))):
            self._refuse(leaves, wrong, size)
        return size

    def check(
        self, leaves: Sequence[Any], size: int, among: Iterable[int] | None = None
    ) -> None:
        """Raises unless every mapped axis (`among` some positions) has this size."""
        if self._others(leaves, size, range(len(leaves)) if among is None else among):
            self.size(leaves)  # says which size was meant

    def _others(
        self, leaves: Sequence[Any], size: int, among: Iterable[int]
    ) -> list[int]:
        """Positions of the leaves whose mapped axis does not have this size."""
        return [
            position
            for position in among
            if (axis := self.axes[position]) is not None
            and _axis_size(leaves[position], axis) != size
        ]

    def _refuse(self, leaves: Sequence[Any], wrong: list[int], size: int) -> NoReturn:
        names = self.names(leaves)
        lines, ways_out = [], []
        for position in wrong:
            line, way_out = _complaint(leaves[position], self.axes[position], size)
            lines.append(f"{names[position]}: {line}")
            ways_out.append(way_out)
        shown = lines[:10] + [f"and {len(lines) - 10} more"] * (len(lines) > 10)
        raise ValueError(
            f"pmap({self.function_name()}) maps over {size} devices, and "
            f"{len(wrong)} of {len(leaves)} leaves cannot be split so:\n  "
            + "\n  ".join(shown)
            + "".join(f"\n{way_out}" for way_out in dict.fromkeys(ways_out))
        )

    def explain_split_keys(
        self, error: Exception, rows: Sequence[Any], size: int
    ) -> None:
        """Adds to an error about a key that it is one key, split over the devices.

        A raw key is uint32[2], so that two devices take it for one row each.
        """
        if "PRNG" not in str(error) or size not in _WORDS_OF_A_KEY:
            return
        for name, row, axis in zip(self.names(rows), rows, self.axes, strict=True):
            if axis == 0 and row.dtype == np.uint32 and not row.shape:
                error.add_note(
                    f"pmap({self.function_name()}) took {name}, uint32[{size}], for "
                    f"one row on each of {size} devices, and it looks like one PRNG "
                    f"key. {_ONE_KEY}"
                )

    def donated(self) -> tuple[int, ...]:
        """The positions of the leaves of the donated arguments."""
        counts = [
            argument.num_leaves for argument in self.tree.children()[0].children()
        ]
        ends = [*accumulate(counts, initial=0)]
        arguments = [i for i in self.options.donated if i < len(counts)]
        return tuple(p for i in arguments for p in range(ends[i], ends[i + 1]))

    def function_name(self) -> str:
        """The name of the function, for messages and profiles."""
        return getattr(self.fun(), "__name__", type(self.fun()).__name__)

    def names(self, leaves: Sequence[Any]) -> list[str]:
        """The path of every leaf, from the names of the function's arguments."""
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        static = self.options.static
        parameters = _parameter_names(self.fun(), len(args) + len(static))
        mapped = [name for i, name in enumerate(parameters) if i not in static]
        return [
            path
            for name, argument in [*zip(mapped, args, strict=True), *kwargs.items()]
            for path, _ in named_leaves(argument, name)
        ]

    def static_names(self, count: int) -> list[str]:
        """The names of the static arguments, of which there are `count`."""
        total = len(self.tree.children()[0].children()) + count
        names = _parameter_names(self.fun(), total)
        return [names[i] for i in self.options.static]


_UNREPLICATED = (
    "These look un-replicated: pass them through lockstep.compat.replicate(), or give "
    "in_axes=None to an argument that all devices share."
)
_ONE_KEY = (
    "Each device needs a PRNG key of its own: split it with "
    "lockstep.compat.shard_prng_key(), or give it in_axes=None if all shall draw the "
    "same numbers."
)
_WORDS_OF_A_KEY = (2, 4)  # of Threefry, of RBG
_SCALAR = (
    "A scalar has no axis: broadcast it with in_axes=None or "
    "lockstep.compat.replicate(), or mark it static with static_broadcasted_argnums."
)


def _complaint(leaf: Any, axis: int | None, expected: int) -> tuple[str, str]:
    """What is wrong with one leaf, and the way out."""
    kind = describe_leaf(leaf)
    if _is_one_key(leaf):
        return f"this leaf is one PRNG key, {kind}, expected {expected} keys", _ONE_KEY
    if not np.ndim(leaf):
        return f"rank 0, cannot be split: {kind}", _SCALAR
    size = _axis_size(leaf, axis or 0)
    if size is None:
        return f"rank {np.ndim(leaf)}, has no axis {axis}: {kind}", _UNREPLICATED
    place = f"axis {axis}" if axis else "leading axis"
    return f"{place} {size}, expected {expected} (devices): {kind}", _UNREPLICATED


def _is_one_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return False
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return not leaf.shape
    return dtype == np.uint32 and leaf.shape in [(n,) for n in _WORDS_OF_A_KEY]


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
