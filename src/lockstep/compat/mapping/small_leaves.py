"""Small results of all processes, handed to this process together.

Wrapping one array anew takes Python some 28 us, whatever its size. So small arrays are
laid end to end, on each device by itself; that one array is wrapped anew, and a second
program, over this process's devices, takes it apart again.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.compat.mapping.shards import no_other_mesh

MAX_BYTES = 16 << 10
"""What an array may take on each device; it then lies there twice, as packed or not."""
MIN_ARRAYS = 16
"""From how many on the two programs take less time than wrapping each."""


@dataclass(frozen=True)
class Bundle:
    """Small arrays of one dtype.

    Attributes:
        positions: which of the arrays.
        pack: takes them, over the devices of all processes, into one.
        unpack: takes that one apart, over the devices of this process.
    """

    positions: tuple[int, ...]
    pack: Callable[..., jax.Array]
    unpack: Callable[[jax.Array], tuple[jax.Array, ...]]


def bundles_of(arrays: Sequence[jax.Array]) -> tuple[Bundle, ...]:
    """Which of the arrays, as they come out of one program, to hand over together."""
    if len(arrays) < MIN_ARRAYS:
        return ()
    return _bundles(tuple([_form(array) for array in arrays]))


@jax.jit
def weaken(array: jax.Array) -> jax.Array:
    """Weakly typed again, which assembling from pieces forgets."""
    return convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def _form(array: jax.Array) -> tuple[Any, tuple[int, ...], Any, bool]:
    weak = getattr(array, "weak_type", False)  # arrays of typed keys have none
    return array.sharding, array.shape, array.dtype, weak


@lru_cache(maxsize=256)
def _bundles(forms: tuple[Any, ...]) -> tuple[Bundle, ...]:
    alike: dict[Any, list[int]] = defaultdict(list)
    for position, (sharding, shape, dtype, _) in enumerate(forms):
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            continue
        if math.prod(sharding.shard_shape(shape)) * dtype.itemsize <= MAX_BYTES:
            alike[sharding.mesh, dtype].append(position)
    return tuple(
        _bundle(mesh, positions, [forms[p] for p in positions])
        for (mesh, _), positions in alike.items()
        if len(positions) >= MIN_ARRAYS
    )


def _bundle(mesh: Mesh, positions: list[int], forms: list[Any]) -> Bundle:
    specs = tuple(sharding.spec for sharding, *_ in forms)
    shapes = [sharding.shard_shape(shape) for sharding, shape, *_ in forms]
    weak = [is_weak for *_, is_weak in forms]
    ends = [*accumulate(map(math.prod, shapes), initial=0)]
    row_each = P(mesh.axis_names)  # one row for each device, however it is meshed

    def pack(*arrays: jax.Array) -> jax.Array:
        def lay(*shards: jax.Array) -> jax.Array:
            return jnp.concatenate([shard.reshape(-1) for shard in shards])[None]

        with no_other_mesh(mesh):
            return _on_each_device(lay, mesh, specs, row_each)(*arrays)

    def unpack(packed: jax.Array) -> tuple[jax.Array, ...]:
        def take(row: jax.Array) -> tuple[jax.Array, ...]:
            pairs = zip(ends[:-1], ends[1:], shapes, strict=True)
            return tuple(row[0, a:b].reshape(shape) for a, b, shape in pairs)

        with no_other_mesh(here):
            arrays = _on_each_device(take, here, row_each, specs)(packed)
        pairs = zip(arrays, weak, strict=True)
        return tuple(weaken(a) if is_weak else a for a, is_weak in pairs)

    here = mesh.local_mesh
    layouts = tuple(NamedSharding(here, spec) for spec in specs)
    unpacks = jax.jit(unpack, out_shardings=layouts)
    return Bundle(tuple(positions), jax.jit(pack), unpacks)


def _on_each_device(body: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
