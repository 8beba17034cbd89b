"""Several processes: arrays of this process outside, of all processes inside.

Every process calls a mapped function with an axis of its own devices, and gets that
axis back; inside, the axis runs over the devices of all processes. So each argument is
wrapped as the global array whose local rows it is, and each result is unwrapped; the
memory is the same, but for small results (see `small_leaves`). The global array behind
a result is remembered as long as the result lives, so that the state of a loop is
wrapped once, not once a step.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lockstep.compat.mapping.leaves import MappedLeaves
from lockstep.compat.mapping.program import Program, Records, is_traced
from lockstep.compat.mapping.shards import is_float0
from lockstep.compat.mapping.small_leaves import bundles_of, weaken
from lockstep.tree import identity

_assemble = jax.make_array_from_single_device_arrays

_behind: dict[int, tuple[weakref.ref, jax.Array]] = {}
"""The global array behind a local one, by the identity of the local one."""


class SpanningProgram(Program):
    """A program on the devices of several processes.

    Args:
        leaves: as for a `Program`.
        static: as for a `Program`.
        mesh: over the devices of all processes.
        records: as for a `Program`.
        alone: gives the program for the devices of this process alone.
    """

    def __init__(
        self,
        leaves: MappedLeaves,
        static: tuple[Any, ...],
        mesh: Mesh,
        records: Records,
        alone: Callable[[], Program],
    ):
        super().__init__(leaves, static, mesh, records)
        self._alone = alone
        self._size_here = mesh.local_mesh.devices.shape[0]
        self._wants_here = [_here(want) for want in self.wants]

    def __call__(self, leaves: list[Any]) -> Any:
        """Runs on the leaves of this process's arguments."""
        if is_traced(leaves):
            return self._alone()(leaves)
        leaves = self.owned(leaves)
        wide: list[Any] = [_recall(leaf) for leaf in leaves]
        odd = [
            position
            for position, (array, want) in enumerate(zip(wide, self.wants, strict=True))
            if array is None or not self._fits(array.sharding, want)
        ]
        if odd:
            self.leaves.check(leaves, self._size_here, odd)
            self.tell_moves(leaves, self._wants_here, odd)
        for position in odd:
            wide[position] = to_global(leaves[position], self.wants[position])
        out = self.run(wide)
        self._delete_donated(leaves, wide)
        arrays, tree = jax.tree.flatten(out)
        return jax.tree.unflatten(tree, to_local(arrays))

    def _delete_donated(self, leaves: list[Any], wide: list[jax.Array]) -> None:
        """Deletes the arrays of this process that do not share what was donated."""
        for position in self.donated:
            leaf, array = leaves[position], wide[position]
            if array.is_deleted() and _recall(leaf) is array:
                leaf.delete()

    def lower(self, leaves: list[Any]) -> Any:
        """The lowered program; it takes and returns arrays of all processes."""
        return super().lower([*map(_describe, leaves, self.wants)])


def _recall(leaf: Any) -> jax.Array | None:
    """The global array behind an array of this process, if there is one yet."""
    reference, array = _behind.get(identity(leaf), (None, None))
    return array if reference is not None and reference() is leaf else None


def _remember(local: jax.Array, array: jax.Array) -> None:
    key = identity(local)
    _behind[key] = weakref.ref(local, partial(_behind.pop, key)), array


def to_global(leaf: Any, want: NamedSharding) -> jax.Array:
    """The array of all processes, of which this process holds the rows `leaf`."""
    here = _here(want)
    if getattr(leaf, "sharding", None) != here:
        leaf = np.zeros(leaf.shape, bool) if is_float0(leaf) else leaf
        leaf = jax.device_put(leaf, here)
    pieces = [shard.data for shard in leaf.addressable_shards]
    array = _assemble(_global_shape(leaf.shape, want), want, pieces)
    array = weaken(array) if jax.typeof(leaf).weak_type else array
    _remember(leaf, array)
    return array


def to_local(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """This process's rows of arrays of all processes, which one program returned."""
    rows: list[Any] = [None] * len(arrays)
    for bundle in bundles_of(arrays):
        packed = bundle.pack(*[arrays[position] for position in bundle.positions])
        unpacked = bundle.unpack(_unwrap(packed))
        for position, row in zip(bundle.positions, unpacked, strict=True):
            rows[position] = row
    for position, array in enumerate(arrays):
        if rows[position] is None:
            rows[position] = _unwrap(array)
        _remember(rows[position], array)
    return rows


def _unwrap(array: jax.Array) -> jax.Array:
    """This process's rows of an array of all processes, in the same memory."""
    shape, here, positions = _local_form(array.sharding, array.shape)
    if positions is None:
        pieces = [shard.data for shard in array.addressable_shards]
    else:
        take = array.addressable_data
        pieces = [take(position) for position in positions]
    local = _assemble(shape, here, pieces)
    return weaken(local) if getattr(array, "weak_type", False) else local


@lru_cache(maxsize=4096)
def _local_form(
    sharding: Any, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], NamedSharding, range | None]:
    """Shape and place of the local rows, and which pieces they are.

    The pieces of a replicated array can be had by its shards alone.
    """
    shape = tuple(map(operator.floordiv, shape, _times_longer(sharding, len(shape))))
    positions = range(sharding.mesh.local_mesh.size)
    return shape, _here(sharding), None if sharding.is_fully_replicated else positions


def _describe(leaf: Any, want: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape and type of `to_global(leaf, want)`."""
    kind = jax.typeof(leaf)
    shape, weak = _global_shape(kind.shape, want), kind.weak_type
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak)


def _global_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    return tuple(map(operator.mul, shape, _times_longer(sharding, len(shape))))


@lru_cache(maxsize=1024)
def _times_longer(sharding: Any, rank: int) -> tuple[int, ...]:
    """How many times longer a global array is than the local one, along each axis."""
    mesh, times = sharding.mesh, [1] * rank
    for axis, names in enumerate(sharding.spec):
        for name in (names,) if isinstance(names, str) else names or ():
            times[axis] *= mesh.shape[name] // mesh.local_mesh.shape[name]
    return tuple(times)


@lru_cache(maxsize=1024)
def _here(sharding: Any) -> NamedSharding:
    """The same partition over this process's devices alone."""
    return NamedSharding(sharding.mesh.local_mesh, sharding.spec)
