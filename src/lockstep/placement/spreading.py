"""Host values onto the devices of several processes, and back.

Each process places what its own devices hold; nothing passes between processes but
where rows are gathered. `jax.device_put` would gather every value on all of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lockstep import sharding, tree
from lockstep.distributed.session import current, exchange, group_of
from lockstep.distributed.warm_up import meet


def everywhere(leaf: Any, where: NamedSharding) -> jax.Array:
    """A value that is the same on all processes, on all devices of `where`.

    A Python number, and a weak scalar, stay weakly typed.
    """
    if tree.is_key(leaf):
        words = everywhere(jax.random.key_data(leaf), where)
        return _wrap_keys(words, where, jax.random.key_impl(leaf))
    if getattr(leaf, "weak_type", False) and leaf.shape == ():
        leaf = leaf.item()
    if not hasattr(leaf, "dtype"):
        return _place_number(where)(leaf)
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def by_rows(leaf: Any, where: NamedSharding, rows: int) -> jax.Array:
    """This process's rows of a leaf, as its part of `rows` global rows."""
    if tree.is_key(leaf):
        words = by_rows(jax.random.key_data(leaf), where, rows)
        return _wrap_keys(words, where, jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    shape = (rows, *host.shape[1:])
    return jax.make_array_from_process_local_data(where, host, shape)


def place(leaf: Any, where: NamedSharding, rows: int) -> jax.Array:
    """One leaf of a batch: by its rows, or on all devices if it has none."""
    split = any(where.spec)
    return by_rows(leaf, where, rows) if split else everywhere(leaf, where)


def take_everywhere(batch: Any, index: np.ndarray, mesh: Mesh) -> Any:
    """Some rows of a batch that is split over processes, on every device.

    A collective: the main threads of all processes call it together.
    """
    _come_together(mesh, "a short batch that is gathered")
    return _take(mesh)(batch, index)


def whole(values: Any) -> Any:
    """Arrays split over processes as arrays whose copies every process can read.

    A collective, like `take_everywhere`.
    """
    split = [
        leaf
        for leaf in jax.tree.leaves(values)
        if isinstance(leaf, jax.Array) and not _is_readable(leaf)
    ]
    if not split:
        return values
    by_mesh: dict[Mesh, list[jax.Array]] = {}
    for leaf in split:
        by_mesh.setdefault(_mesh_of(leaf), []).append(leaf)
    copies: dict[int, jax.Array] = {}
    for mesh, leaves in by_mesh.items():
        _come_together(mesh, "an array that is gathered")
        copies |= zip(map(id, leaves), _replicate(mesh)(leaves), strict=True)
    return jax.tree.map(lambda leaf: copies.get(id(leaf), leaf), values)


def _come_together(mesh: Mesh, what: str) -> None:
    """Wait for all on the host: a collective of some only would never end."""
    group = group_of(mesh)
    if current() is not None:
        exchange(None, group, what=what)
    meet(mesh)


def _wrap_keys(words: jax.Array, where: NamedSharding, impl: Any) -> jax.Array:
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl)
    return jax.jit(wrap, out_shardings=where)(words)


def _is_readable(leaf: jax.Array) -> bool:
    return leaf.is_fully_addressable or leaf.is_fully_replicated


def _mesh_of(leaf: jax.Array) -> Mesh:
    where = leaf.sharding
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        return where.mesh
    devices = sorted(where.device_set, key=lambda d: (d.process_index, d.id))
    return Mesh(np.array(devices), ("data",))


@functools.cache
def _place_number(where: NamedSharding) -> Any:
    return jax.jit(lambda number: number, out_shardings=where)


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=sharding.replicated(mesh))


@functools.cache
def _take(mesh: Mesh) -> Any:
    def take(batch: Any, index: jax.Array) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.take(leaf, index, axis=0) if leaf.ndim else leaf, batch
        )

    return jax.jit(take, out_shardings=sharding.replicated(mesh))
