"""Between a mapped axis and a shard of size 1 on it, as `shard_map` hands it out."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from lockstep.compat.options import spread


def spec(axis: int | None, mesh_axis: str) -> P:
    """The partition of an array whose `axis` is split over `mesh_axis`.

    Example:
        >>> spec(1, "i"), spec(None, "i")
        (PartitionSpec(None, 'i'), PartitionSpec())
    """
    return P() if axis is None else P(*[None] * axis, mesh_axis)


def specs(axes: Any, mesh_axis: str) -> Any:
    """The same for a tree of axes."""
    return jax.tree.map(lambda axis: spec(axis, mesh_axis), axes, is_leaf=is_none)


def is_none(leaf: Any) -> bool:
    """For trees of axes, where `None` is a leaf."""
    return leaf is None


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
        stacked = [v if axis is None else lax.expand_dims(v, [axis]) for v, axis in pairs]
        return jax.tree.unflatten(tree, stacked)

    return on_shards
