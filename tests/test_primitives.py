"""The lists of primitives against the JAX at hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import primitives

from lockstep.jaxprs.primitives import DRAWS, ELEMENTWISE, KEYED_DRAWS
from lockstep.jaxprs.varying import equations

KNOWN = {
    getattr(primitives, name).name for name in dir(primitives) if name[-2:] == "_p"
}
IN_NEWER_VERSIONS = {"log2", "one_minus_square"}
NOT_EXPORTED = {"random_clone", "reduce_precision", "square", "stop_gradient"}


def test_every_name_is_one_of_jax():
    assert ELEMENTWISE | DRAWS <= KNOWN | IN_NEWER_VERSIONS | NOT_EXPORTED


@pytest.mark.parametrize(
    "draw",
    [
        jax.random.normal,
        lambda key: jax.random.gamma(key, 2.0),
        lambda key: jax.random.dirichlet(key, jnp.ones(3)),
        lambda key: jax.random.poisson(key, 2.0),
        lambda key: jax.random.permutation(key, 4),
        lambda key: lax.rng_bit_generator(jnp.zeros(4, "uint32"), (3,))[1],
    ],
)
def test_random_numbers_are_seen(draw):
    jaxpr = jax.make_jaxpr(draw)(jax.random.key(0)).jaxpr
    assert {eqn.primitive.name for eqn in equations(jaxpr)} & KEYED_DRAWS


def test_deriving_keys_is_no_draw():
    def derive(key):
        return jax.random.fold_in(jax.random.split(key)[0], 3)

    jaxpr = jax.make_jaxpr(derive)(jax.random.key(0)).jaxpr
    assert not {eqn.primitive.name for eqn in equations(jaxpr)} & DRAWS
