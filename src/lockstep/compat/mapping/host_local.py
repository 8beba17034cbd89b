"""Several processes: arrays of this process outside, of all processes inside.

Every process calls a mapped function with an axis of its own devices, and gets that
axis back; inside, the axis runs over the devices of all processes. So each argument is
wrapped as the global array whose local rows it is, and each result is unwrapped; the
memory is the same. The global array behind a result is remembered as long as the
result lives, so that the state of a loop is wrapped once, not once a step.
"""

import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import Mesh, NamedSharding

from lockstep.compat.mapping.leaves import MappedLeaves
from lockstep.compat.mapping.moves import Moves, whereabouts
from lockstep.compat.mapping.program import Program, is_traced
from lockstep.compat.mapping.shards import is_float0
from lockstep.compiles import CompileLog

_behind: dict[int, tuple[weakref.ref, jax.Array]] = {}
"""The global array behind a local one, by the identity of the local one."""


class SpanningProgram(Program):
    """A program on the devices of several processes.

    Args:
        leaves: as for a `Program`.
        static: as for a `Program`.
        mesh: over the devices of all processes.
        moves: as for a `Program`.
        compiles: as for a `Program`.
        alone: gives the program for the devices of this process alone.
    """

    def __init__(
        self,
        leaves: MappedLeaves,
        static: tuple[Any, ...],
        mesh: Mesh,
        moves: Moves,
        compiles: CompileLog,
        alone: Callable[[], Program],
    ):
        super().__init__(leaves, static, mesh, moves, compiles)
        self._alone = alone
        self._size_here = mesh.local_mesh.devices.shape[0]
        self._wants_here = [_here(want) for want in self.wants]

    def __call__(self, leaves: list[Any]) -> Any:
        """Runs on the leaves of this process's arguments."""
        if is_traced(leaves):
            return self._alone()(leaves)
        if whereabouts(leaves) != self._wants_here:
            self.leaves.check(leaves, self._size_here)
            self.tell_moves(leaves, self._wants_here, range(len(leaves)))
        return jax.tree.map(to_local, self._run(*map(to_global, leaves, self.wants)))

    def lower(self, leaves: list[Any]) -> Any:
        """The lowered program; it takes and returns arrays of all processes."""
        return super().lower([*map(_describe, leaves, self.wants)])


def to_global(leaf: Any, want: NamedSharding) -> jax.Array:
    """The array of all processes, of which this process holds the rows `leaf`."""
    reference, array = _behind.get(id(leaf), (None, None))
    if array is not None and reference() is leaf and array.sharding == want:
        return array
    here = _here(want)
    if getattr(leaf, "sharding", None) != here:
        leaf = np.zeros(leaf.shape, bool) if is_float0(leaf) else leaf
        leaf = jax.device_put(leaf, here)
    array = _rewrap(leaf, _global_shape(leaf.shape, want), want)
    _remember(leaf, array)
    return array


def to_local(array: jax.Array) -> jax.Array:
    """This process's rows of an array of all processes."""
    sharding = array.sharding
    times = zip(array.shape, _times_longer(sharding, array.ndim), strict=True)
    local = _rewrap(array, tuple(n // k for n, k in times), _here(sharding))
    _remember(local, array)
    return local


def _describe(leaf: Any, want: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape and type of `to_global(leaf, want)`."""
    shape, dtype = _global_shape(np.shape(leaf), want), jax.dtypes.result_type(leaf)
    weak = jax.typeof(leaf).weak_type
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)


def _global_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    times = _times_longer(sharding, len(shape))
    return tuple(n * k for n, k in zip(shape, times, strict=True))


@lru_cache(maxsize=1024)
def _here(sharding: Any) -> NamedSharding:
    """The same partition over this process's devices alone."""
    return NamedSharding(sharding.mesh.local_mesh, sharding.spec)


@lru_cache(maxsize=1024)
def _times_longer(sharding: Any, rank: int) -> tuple[int, ...]:
    """How many times longer each axis of a global array is than that of the local one."""
    mesh, times = sharding.mesh, [1] * rank
    for axis, names in enumerate(sharding.spec):
        for name in (names,) if isinstance(names, str) else names or ():
            times[axis] *= mesh.shape[name] // mesh.local_mesh.shape[name]
    return tuple(times)


def _rewrap(array: jax.Array, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """The same memory as an array of another shape."""
    pieces = [shard.data for shard in array.addressable_shards]
    whole = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
    return _weaken(whole) if jax.typeof(array).weak_type else whole


@jax.jit
def _weaken(array: jax.Array) -> jax.Array:
    """Weakly typed again, which assembling from pieces forgets."""
    return convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def _remember(local: jax.Array, array: jax.Array) -> None:
    key = id(local)
    _behind[key] = weakref.ref(local, partial(_behind.pop, key)), array
