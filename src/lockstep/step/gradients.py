"""From summed gradients to the gradient that the optimizer gets."""

from typing import Any

import jax
import jax.numpy as jnp

from lockstep.reduce import widen


def average(grads: Any, weight: Any, scale: Any = None) -> Any:
    """Summed gradients over the weight of what was summed; over 1 where that is 0.

    Args:
        grads: the sum of gradients.
        weight: a number, 0 where all masks were zero: the sum is then zero as well.
        scale: the loss scale that the gradients still hold.

    Example:
        >>> average(jnp.array([6.0]), 3.0), average(jnp.array([0.0]), 0.0)
        (Array([2.], dtype=float32), Array([0.], dtype=float32))
    """
    weight = jnp.where(weight == 0, 1, weight)
    weight = weight if scale is None else weight * scale
    return jax.tree.map(lambda g: (g / weight).astype(g.dtype), grads)


def global_norm(grads: Any) -> jax.Array:
    """The 2-norm of all leaves together, in float32 or wider.

    Example:
        >>> global_norm((jnp.array([3.0]), jnp.array([[4.0]], jnp.bfloat16)))
        Array(5., dtype=float32)
    """
    squares = [
        jnp.sum(jnp.real(x * jnp.conj(x))) for x in map(widen, jax.tree.leaves(grads))
    ]
    return jnp.sqrt(sum(squares[1:], start=squares[0]))


def clip(grads: Any, norm: jax.Array, limit: float | None) -> Any:
    """Gradients shortened to a norm of `limit`; shorter ones keep every bit.

    Example:
        >>> grads = jnp.array([3.0, 4.0])
        >>> clip(grads, global_norm(grads), 1.0).tolist()
        [0.6000000238418579, 0.800000011920929]
    """
    if limit is None:
        return grads
    factor = limit / jnp.maximum(norm, limit)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
