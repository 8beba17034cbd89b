"""A first state, made on the devices, each leaf where the step wants it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep import sharding
from lockstep.parallel.carried import Carrier


def make_state(
    make: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh, carrier: Carrier
) -> Any:
    """Run `make(*args)` as one program whose outputs lie as the step places them."""
    everywhere = sharding.replicated(mesh)

    def describe(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    shapes = jax.tree.map(describe, jax.eval_shape(make, *args))
    layout = jax.tree.map(lambda leaf: leaf.sharding, carrier.lay_out(shapes))
    return jax.jit(make, out_shardings=layout)(*args)
