"""Sums over the devices of a mesh axis, for use inside `shard_map`.

What is summed is sums and counts, never means, so that shards of unequal weight are
averaged right, and everything goes in one collective: the latency of an all-reduce is
paid once a step however many leaves there are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.packing import Packing


def psum_tree(tree: Any, axis_name: str) -> Any:
    """The sum of a tree over the devices of `axis_name`, in one collective.

    16-bit floats travel and are added in float32: eight equal bfloat16 gradients have
    a sum that bfloat16 cannot hold, and some backends abort on a 16-bit reduction.
    Leaves of one dtype share one all-reduce, the small ones as one vector; integers
    need a second one.

    Args:
        tree: arrays of any shapes, of equal shapes on all devices.
        axis_name: the mesh axis.

    Returns:
        The tree with its own dtypes, equal on all devices.

    Example:
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(jax.devices()[:4], ("data",))
        >>> total = jax.shard_map(lambda x: psum_tree(x, "data"), mesh=mesh,
        ...                       in_specs=P("data"), out_specs=P(), check_vma=False)
        >>> total({"rows": jnp.arange(4.0)})
        {'rows': Array([6.], dtype=float32)}
    """
    wide = jax.tree.map(widen, tree)
    packing = Packing.of(wide)
    total = packing.unpack(lax.psum(packing.pack(wide).parts, axis_name))
    return jax.tree.map(lambda x, old: x.astype(old.dtype), total, tree)


def widen(x: Any) -> jax.Array:
    """A float array in at least 32 bits; other arrays as they are.

    Example:
        >>> widen(jnp.ones(2, jnp.bfloat16)).dtype, widen(jnp.ones(2, jnp.int8)).dtype
        (dtype('float32'), dtype('int8'))
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def axis_size(axis_name: str) -> int:
    """The number of devices on `axis_name`, with the axis checked for our use.

    Raises:
        RuntimeError: there is no such axis here, or `shard_map` was called with
            `check_vma=True`. JAX then sums gradients of replicated parameters over the
            devices by itself, and a second sum would make them N times too large.
    """
    try:
        size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    except NameError as error:
        raise RuntimeError(
            f"this step reduces over the axis {axis_name!r}, which is not there: "
            f"run it with lockstep.per_device(step, axis_name={axis_name!r}), or make "
            "the step without axis_name and use lockstep.parallelize"
        ) from error
    marks = getattr(jax.typeof(index), "manual_axis_type", None)
    if getattr(marks, "varying", ()):
        raise RuntimeError(
            "this step reduces its gradients itself, and under "
            "jax.shard_map(..., check_vma=True) JAX does so too: every gradient would "
            f"be {size} x too large. Use lockstep.per_device, or check_vma=False"
        )
    return size
