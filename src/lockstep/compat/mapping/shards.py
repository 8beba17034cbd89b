"""Stacked arrays: how they lie on the devices, and what one device sees of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.compat.mapping.options import spread


@lru_cache(maxsize=1024)
def stacked(
    devices: tuple[jax.Device, ...], axis: int | None = 0, name: str = "batch"
) -> NamedSharding:
    """One index of `axis` on each device; `None` for a copy on each.

    Equal layouts are one object, so that a call sees at a glance what is in its place.

    Args:
        devices: the devices in the order of the axis.
        axis: which axis of the array.
        name: what the mesh calls it. To JAX arrays that lie alike under two names have
            two types; the default is the name that most code gives to `pmap`.
    """
    if len(set(devices)) < len(devices):
        raise ValueError(f"each device holds one row, and {devices} names one twice")
    return NamedSharding(Mesh(np.asarray(devices), (name,)), spec(axis, name))


def spec(axis: int | None, mesh_axis: str) -> P:
    """The partition of an array whose `axis` is split over `mesh_axis`.

    Example:
        >>> tuple(spec(1, "i")), tuple(spec(None, "i"))
        ((None, 'i'), ())
    """
    return P() if axis is None else P(*[None] * axis, mesh_axis)


def specs(axes: Any, mesh_axis: str) -> Any:
    """The same for a tree of axes."""
    return jax.tree.map(lambda axis: spec(axis, mesh_axis), axes, is_leaf=is_none)


def from_host(array: np.ndarray, layout: NamedSharding) -> jax.Array:
    """An array of NumPy on the devices; for one array faster than `jax.device_put`.

    As in `jax.pmap` it counts as implicit, which `jax.transfer_guard` can refuse.
    """
    return jax.make_array_from_callback(array.shape, layout, array.__getitem__)


def is_none(leaf: Any) -> bool:
    """For trees of axes, where `None` is a leaf."""
    return leaf is None


def is_float0(leaf: Any) -> bool:
    """Whether a leaf is a gradient of an integer, which no device takes."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def on_rows(
    body: Callable[..., Any], axes: tuple[int | None, ...], out_axes: Any
) -> Callable[..., Any]:
    """A function of shards, from one that does not see the mapped axis.

    Args:
        body: takes leaves without the mapped axis, and returns a tree without it.
        axes: the mapped axis of each leaf; `None` for those that are not mapped.
        out_axes: the same for the results, a prefix of their tree.
    """

    def on_shards(*shards: Any) -> Any:
        pairs = zip(shards, axes, strict=True)
        rows = [s if axis is None else lax.squeeze(s, [axis]) for s, axis in pairs]
        leaves, tree = jax.tree.flatten(out := body(*rows))
        pairs = zip(leaves, spread(out_axes, out, "pmap out_axes"), strict=True)
        stacked = [
            v if axis is None else lax.expand_dims(v, [axis]) for v, axis in pairs
        ]
        return jax.tree.unflatten(tree, stacked)

    return on_shards


def no_other_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Replaces a mesh that the caller has set, over which nothing is to be mapped."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
