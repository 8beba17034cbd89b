"""Where a NaN was made: the operation and the line, whatever JAX puts around."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from lockstep.debug.nonfinite.origin import find_origin


def origin_of(fn, *args):
    leaves = jax.tree.leaves(args)
    return find_origin(jax.make_jaxpr(fn)(*args), leaves)


def test_a_healthy_function_has_none():
    assert origin_of(jax.grad(lambda x: jnp.log(x).sum()), jnp.ones(3)) is None
    assert origin_of(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), jnp.zeros(3)) is None


def test_what_was_bad_before_has_none():
    assert origin_of(lambda x: 2 * x, jnp.full(3, jnp.nan)) is None


def test_the_line_and_the_infinity_before_it():
    def loss(x):
        p = jnp.log(x)
        return (0.0 * p).sum()

    origin = origin_of(loss, jnp.zeros(3))
    text = str(origin)
    assert "nan made by `mul`" in text and "test_origin.py" in text
    assert "in loss: return (0.0 * p).sum()" in text
    assert "from an inf made by `log`" in text and "p = jnp.log(x)" in text
    assert origin.line == origin.cause.line + 1


def test_the_backward_pass_names_the_line_of_the_forward_pass():
    def norm(x):
        return jnp.sqrt((x**2).sum())

    origin = origin_of(jax.grad(norm), jnp.zeros(3))
    assert origin.kind == "nan" and origin.function == "norm"
    assert "jnp.sqrt" in str(origin)


def test_a_nan_thrown_away_is_not_blamed_but_its_gradient_is():
    def safe(x):
        return jnp.where(x > 0, jnp.log(jnp.maximum(x, 0.0)), jnp.sqrt(x - 1)).sum()

    origin = origin_of(safe, jnp.array([2.0, 0.5]))
    assert origin is None
    origin = origin_of(safe, jnp.array([0.0]))
    assert origin.operation == "sqrt"


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_inside_other_functions(wrap):
    origin = origin_of(lambda x: wrap(jnp.log)(x).sum(), jnp.array([1.0, -1.0]))
    assert (origin.kind, origin.operation) == ("nan", "log")


def test_inside_a_loop_it_is_the_first_bad_round():
    def step(c, x):
        c = c - x
        return c, jnp.sqrt(c)

    def run(xs):
        c, ys = jax.lax.scan(step, 2.0, xs)
        return ys.sum() + c

    origin = origin_of(run, jnp.ones(5))
    assert (origin.operation, origin.function) == ("sqrt", "step")
    origin = origin_of(jax.grad(run), jnp.array([1.0, 1.0, 0.0]))
    assert origin is not None and origin.function == "step"
    assert origin_of(run, jnp.full(2, 0.5)) is None


def test_inside_a_library_it_is_the_line_that_called_it():
    def loss(logits):
        probabilities = optax.safe_softmax(logits) if 0 else jax.nn.softmax(logits)
        return optax.kl_divergence(jnp.log(probabilities), probabilities).sum()

    origin = origin_of(jax.grad(loss), jnp.array([0.0, 400.0]))
    assert origin.function == "loss" and "test_origin.py" in origin.file


def test_inside_a_map_over_one_device(mesh_of):
    def local(x):
        return jax.lax.pmean(jnp.log(x).mean(), "data")

    whole = PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh_of(1), in_specs=whole, out_specs=whole, check_vma=False
    )
    origin = origin_of(jax.jit(mapped), -np.ones(4, np.float32))
    assert (origin.operation, origin.function) == ("log", "local")
