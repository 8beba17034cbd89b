"""Scanning along any axes of an array, and over several at once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def scan_in_dim(
    body_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    axis: int | Sequence[int] = (0,),
    unroll: int | Sequence[int] = (1,),
    keepdims: bool = False,
) -> tuple[Any, Any]:
    """`lax.scan` along given axes, the first of them outermost.

    Args:
        body_fn: `(carry, x) -> (carry, y)`.
        init: the first carry.
        xs: a tree of arrays that are scanned along `axis`.
        axis: the axes to scan along.
        unroll: how many iterations run as one, an int for each axis; the first axes
            have 1 where there are fewer.
        keepdims: whether `body_fn` sees and returns the scanned axes with size 1.

    Returns:
        The last carry, and the tree of `y` stacked along the same axes.

    Example:
        >>> running = lambda total, x: (total + x, total + x)
        >>> scan_in_dim(running, jnp.zeros(2), jnp.ones((2, 3)), axis=1)[1].tolist()
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    unrolls = (unroll,) if isinstance(unroll, int) else tuple(unroll)
    unrolls = (1,) * (len(axes) - len(unrolls)) + unrolls
    leading = tuple(range(len(axes)))
    to_front = partial(jnp.moveaxis, source=axes, destination=leading)
    to_place = partial(jnp.moveaxis, source=leading, destination=axes)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        if not keepdims:
            return body_fn(carry, x)
        x = jax.tree.map(lambda x: to_place(jnp.expand_dims(x, leading)), x)
        carry, y = body_fn(carry, x)
        return carry, jax.tree.map(lambda y: jnp.squeeze(to_front(y), leading), y)

    scan: Callable[..., tuple[Any, Any]] = body
    for steps in reversed(unrolls):
        scan = partial(lax.scan, scan, unroll=steps)
    carry, ys = scan(init, jax.tree.map(to_front, xs))
    return carry, jax.tree.map(to_place, ys)
