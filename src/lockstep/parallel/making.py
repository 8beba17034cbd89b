"""A first state, made on the devices, each leaf where the step wants it."""

from collections.abc import Callable
from typing import Any

import jax

from lockstep import sharding


def make_state(make: Callable[..., Any], args: tuple[Any, ...], step: Any) -> Any:
    """Run `make(*args)` as one program whose outputs lie as the step places them."""
    if not callable(make):
        raise TypeError(
            f"make_state(make, ...) got a {type(make).__name__}: give the function "
            "that makes the state, as step.make_state(init, key); place_state takes a "
            "state"
        )
    everywhere = sharding.replicated(step.mesh)

    def describe(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    shapes = jax.tree.map(describe, jax.eval_shape(make, *args))
    layout = jax.tree.map(lambda leaf: leaf.sharding, step.lay_out(shapes))
    return jax.jit(make, out_shardings=layout)(*args)
