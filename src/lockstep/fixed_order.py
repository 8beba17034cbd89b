"""Sums that have the same bits on 1, 2, 4 and 8 devices.

Floating-point addition depends on its order, so there is one order: the parts are the
leaves of a binary tree, part 0 + part 1, part 2 + part 3, and so on upwards. A device
that holds several parts adds its own branch of the tree; the devices then add the
upper levels. Compilers depend on what surrounds a computation, so what has to give the
same bits everywhere is `sealed`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# A program for several devices merges equal subexpressions before it is simplified, one
# for a single device after, and e / sum becomes e * (1 / sum) where sum is used once.
# Without the merging both start alike.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cse"}


def sealed(
    alive: jax.Array, fn: Callable[..., Any], otherwise: Callable[..., Any], *args: Any
) -> Any:
    """`fn(*args)`, compiled as a computation of its own.

    A branch of a conditional shares no fused loop with what is around it. A multiply
    inside and an add outside would otherwise become one instruction, which rounds once
    and not twice, wherever the compiler finds them side by side.

    Args:
        alive: true, in a way that the compiler cannot know.
        fn: what to compute.
        otherwise: takes the same arguments and gives the same types; never runs.
        *args: trees of arrays.

    Example:
        >>> step = jnp.zeros((), jnp.int32)
        >>> float(sealed(step >= 0, jnp.sin, jnp.zeros_like, 0.0))
        0.0
    """
    return lax.cond(alive, fn, otherwise, *args)


def sum_parts(
    part: Callable[[jax.Array], Any],
    first: Any,
    count: int,
    merge: Callable[[Any, Any], Any],
) -> Any:
    """`part(first)`, `part(first + 1)`, ... merged in pairs, and the pairs in pairs.

    Of the parts and partial sums log2(count) + 2 are in memory at once, and `part` is
    compiled once.

    Args:
        part: the number of a part to a tree of arrays.
        first: the number of the first part.
        count: how many there are: a power of two.
        merge: two parts to one of the same types, usually their sum.

    Example:
        >>> float(sum_parts(lambda i: i.astype(float), 1, 4, jnp.add))
        10.0
    """
    first = jnp.asarray(first, jnp.int32)
    if count == 1:
        return part(first)
    half = count // 2

    def add(i: jax.Array, total: Any) -> Any:
        branch = sum_parts(part, first + i * half, half, merge)
        # Not 0 + x, which makes 0 of -0: a device with one part adds nothing.
        merged = merge(total, branch)
        return jax.tree.map(lambda x, y: jnp.where(i == 0, x, y), branch, merged)

    shapes = jax.eval_shape(part, first)
    zeros = jax.tree.map(lambda x: lax.full_like(x, 0), shapes)
    return lax.fori_loop(0, 2, add, zeros)


def sum_devices(tree: Any, axis_name: str) -> Any:
    """The sum of a tree over the devices of an axis, as a tree of neighbours.

    By recursive halving: in round k a device exchanges half of what it still has with
    the device whose number differs in bit k, and so ends with the sum of one part in
    N, which is gathered. A device sends as many bytes as in a ring.

    Args:
        tree: arrays of any shapes, of equal shapes on all devices.
        axis_name: the mesh axis; its size is a power of two.

    Returns:
        The tree with its own dtypes, equal on all devices.

    Example:
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(jax.devices()[:4], ("data",))
        >>> total = jax.shard_map(lambda x: sum_devices(x, "data"), mesh=mesh,
        ...                       in_specs=P("data"), out_specs=P(), check_vma=False)
        >>> total({"rows": jnp.arange(4.0)})
        {'rows': Array([6.], dtype=float32)}
    """
    if lax.axis_size(axis_name) == 1:
        return lax.psum(tree, axis_name)  # adds nothing, and says that it is the sum
    leaves, structure = jax.tree.flatten(tree)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        alike = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        packed = jnp.concatenate([jnp.ravel(leaves[i]) for i in alike])
        total, start = _sum_vector(packed, axis_name), 0
        for i in alike:
            end = start + leaves[i].size
            leaves[i], start = total[start:end].reshape(leaves[i].shape), end
    return jax.tree.unflatten(structure, leaves)


def _sum_vector(vector: jax.Array, axis_name: str) -> jax.Array:
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rounds = size.bit_length() - 1
    mine = jnp.pad(vector, (0, -vector.size % size)).reshape((2,) * rounds + (-1,))
    for k in range(rounds):  # the axis before the last stands for bit k
        bit = (index >> k) & 1
        keep, give = (
            lax.dynamic_index_in_dim(mine, b, -2, keepdims=False)
            for b in (bit, 1 - bit)
        )
        partners = [(d, d ^ (1 << k)) for d in range(size)]
        mine = keep + lax.ppermute(give, axis_name, partners)
    return lax.all_gather(mine, axis_name, tiled=True)[: vector.size]
