"""Several processes: arrays of this process outside, of all processes inside.

Every process calls a mapped function with an axis of its own devices, and gets that
axis back; inside, the axis runs over the devices of all processes. So each argument is
wrapped as the global array whose local rows it is, and each result is unwrapped; the
memory is the same. The global array behind a result is remembered as long as the result
lives, so that the state of a loop is wrapped once, not once a step.
"""

import weakref
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import Mesh, NamedSharding

_behind: dict[int, tuple[weakref.ref, jax.Array]] = {}
"""The global array behind a local one, by the identity of the local one."""


class HostLocal:
    """The border between this process's part of a mesh and the whole of it.

    Attributes:
        size: the length of the mapped axis in this process.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh.local_mesh
        here = self._mesh.shape
        self._times = {name: size // here[name] for name, size in mesh.shape.items()}
        self.size = self._mesh.devices.shape[0]
        self._here: dict[NamedSharding, NamedSharding] = {}

    def here(self, sharding: NamedSharding) -> NamedSharding:
        """The same partition over this process's devices alone; one object for each."""
        if sharding not in self._here:
            self._here[sharding] = NamedSharding(self._mesh, sharding.spec)
        return self._here[sharding]

    def to_global(self, leaf: Any, want: NamedSharding) -> jax.Array:
        """The array of all processes, of which this process holds the rows `leaf`."""
        reference, array = _behind.get(id(leaf), (None, None))
        if reference is not None and reference() is leaf and array.sharding == want:
            return array
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # no device takes these
            leaf = np.zeros(leaf.shape, bool)
        here = self.here(want)
        if getattr(leaf, "sharding", None) is not here:
            leaf = jax.device_put(leaf, here)
        factors = self._factors(want, leaf.ndim)
        shape = tuple(n * k for n, k in zip(leaf.shape, factors, strict=True))
        array = _rewrap(leaf, shape, want)
        _remember(leaf, array)
        return array

    def describe(self, leaf: Any, want: NamedSharding) -> jax.ShapeDtypeStruct:
        """Shape and type of `to_global(leaf, want)`."""
        kind = jax.typeof(leaf)
        factors = self._factors(want, kind.ndim)
        shape = tuple(n * k for n, k in zip(kind.shape, factors, strict=True))
        weak = kind.weak_type
        return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=want, weak_type=weak)

    def to_local(self, array: jax.Array) -> jax.Array:
        """This process's rows of an array of all processes."""
        factors = self._factors(array.sharding, array.ndim)
        shape = tuple(n // k for n, k in zip(array.shape, factors, strict=True))
        local = _rewrap(array, shape, self.here(array.sharding))
        _remember(local, array)
        return local

    def _factors(self, sharding: NamedSharding, rank: int) -> list[int]:
        """How many times longer the global array is, along each of its axes."""
        factors = [1] * rank
        for axis, names in enumerate(sharding.spec):
            for name in (names,) if isinstance(names, str) else names or ():
                factors[axis] *= self._times[name]
        return factors


def _rewrap(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
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
