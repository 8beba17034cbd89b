"""A whole tree on every device, and back on the host."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import sharding, tree
from lockstep.devices import make_mesh
from lockstep.placement import spreading
from lockstep.placement.host_batches import map_named
from lockstep.placement.leaves import copy_to
from lockstep.placement.same_values import same_values


def replicate(state: Any, mesh: Mesh | None = None) -> Any:
    """Copy a tree to every device of the mesh.

    The caller's own arrays are never shared, so a step may donate the result. Several
    processes must hold the same tree; if they do not, that of process 0 is taken, and
    this is said.
    Python numbers become weakly typed arrays, so that no dtype drifts; `bool`,
    `str`, functions and `None` stay as they are.

    Raises:
        OverflowError: an integer does not fit 32 bits (and x64 is off).
        RuntimeError: a leaf was deleted (its buffer was donated to a step).

    Example:
        >>> state = replicate({"w": np.ones(3), "step": 0}, make_mesh())
        >>> state["w"].sharding.is_fully_replicated, state["step"].weak_type
        (True, True)
    """
    mesh = make_mesh() if mesh is None else mesh
    where = sharding.replicated(mesh)
    state = same_values(state, mesh, "state")
    return map_named(lambda path, leaf: copy_to(leaf, where, path), state, "state")


def to_host(values: Any) -> Any:
    """The tree with every array as NumPy, whole on every process.

    A replicated array is read from one shard; an array split over processes is
    gathered, so all of them must call this together. Typed keys stay keys, on one
    device, for NumPy cannot hold them.

    Example:
        >>> to_host(replicate({"w": 2.5}, make_mesh()))
        {'w': array(2.5, dtype=float32)}
    """
    for path, leaf in tree.named_leaves(values):
        tree.check_leaf_alive(leaf, path)
    return jax.tree.map(_to_host, spreading.whole(values))


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if tree.is_key(leaf):
        words = _to_host(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data)
    return np.asarray(leaf)
