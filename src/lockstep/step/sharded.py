"""The optimizer's state in shards, one a device (ZeRO stage 1).

Every device sums only its share of the gradients, updates that share of the
parameters, and gets the rest from the others: the parameters are whole on every
device, and of the optimizer's state each holds one part (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 5.1).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from lockstep import sharding
from lockstep.packing import Packed
from lockstep.reduce import psum_tree, widen
from lockstep.step.gradients import global_norm


class Whole:
    """Every device updates everything."""

    def __init__(self, axis_name: str | None) -> None:
        """Of the device view with that axis, or of the global view."""
        self._axis = axis_name

    def sum(self, grads: Any, others: Any) -> Any:
        """Gradients and other sums, added over the devices."""
        return psum_tree((grads, others), self._axis) if self._axis else (grads, others)

    def norm(self, grads: Any) -> jax.Array:
        """The norm of all gradients."""
        return global_norm(grads)

    def own(self, trees: Any) -> Any:
        """The part of gradients or parameters that this device updates."""
        return trees

    def all(self, own: Any, before: Any) -> Any:
        """The parameters again, from the parts of all devices."""
        del before
        return own


class Slices(Whole):
    """In the device view: each device has a slice of every vector and large leaf."""

    def __init__(self, axis_name: str) -> None:
        """Over the devices of an axis."""
        super().__init__(axis_name)
        self._name = axis_name

    def sum(self, grads: Packed, others: Any) -> Any:
        """Each device gets the sum of its own slice only."""
        cut = grads.packing.cut_for(lax.axis_size(self._name))
        parts = tuple(
            lax.psum_scatter(cut.flat(widen(part)), self._name, tiled=True)
            for part in grads.parts
        )
        return Packed(parts, cut), psum_tree(others, self._name)

    def norm(self, grads: Packed) -> jax.Array:
        """The norm over all slices; the filling is zero."""
        return jnp.sqrt(lax.psum(global_norm(grads) ** 2, self._name))

    def own(self, trees: Packed) -> Packed:
        """This device's slices; gradients are sliced already."""
        if trees.packing.cut is not None:
            return trees
        cut = trees.packing.cut_for(lax.axis_size(self._name))
        index = lax.axis_index(self._name)
        flat = (cut.flat(part) for part in trees.parts)
        return Packed(tuple(jnp.reshape(x, (cut.cut, -1))[index] for x in flat), cut)

    def all(self, own: Packed, before: Packed) -> Packed:
        """All slices put together on every device."""
        parts = tuple(
            jnp.reshape(
                lax.all_gather(part, self._name, tiled=True)[: old.size], old.shape
            )
            for part, old in zip(own.parts, before.parts, strict=True)
        )
        return Packed(parts, before.packing)


class Layout(Whole):
    """In the global view: leaves are split, and the compiler moves what it must."""

    def __init__(self, mesh: Mesh, axis_name: str) -> None:
        """Over the devices along an axis of a mesh."""
        super().__init__(None)
        self._mesh, self._name = mesh, axis_name

    def own(self, trees: Any) -> Any:
        """The trees, split where the optimizer's state is split."""

        def split(x: jax.Array) -> jax.Array:
            where = sharding.split(self._mesh, self._name, x.shape)
            return _lay(x, where)

        return jax.tree.map(split, trees)

    def all(self, own: Any, before: Any) -> Any:
        """The parameters, whole on every device."""
        del before
        where = sharding.replicated(self._mesh)
        return jax.tree.map(lambda x: _lay(x, where), own)


def _lay(x: jax.Array, where: NamedSharding) -> jax.Array:
    """An array split as asked; on `Explicit` axes the types of arrays say how."""
    if AxisType.Explicit in where.mesh.axis_types:
        return reshard(x, where)
    return with_sharding_constraint(x, where)


def specs(state: Any, axis_name: str) -> Any:
    """How the leaves of a carried state are split inside `shard_map`."""

    def spec(node: Any) -> Any:
        cut = isinstance(node, Packed) and node.packing.cut is not None
        part = PartitionSpec(axis_name) if cut else PartitionSpec()
        return jax.tree.map(lambda _: part, node)

    return jax.tree.map(spec, state, is_leaf=lambda node: isinstance(node, Packed))
