import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lockstep.jaxprs.varying import reduces_over, varying_equations, varying_outputs


def trace(fn, *args):
    return jax.make_jaxpr(fn, axis_env=[("data", 8), ("model", 2)])(*args)


def varies(fn):
    """Whether `fn(equal, shard)` differs between devices."""
    (mark,) = varying_outputs(trace(fn, 1.0, jnp.ones(4)), [False, True], "data")
    return mark


CASES = {
    "parameters": (False, lambda w, x: w * 2),
    "shard": (True, lambda w, x: w * x.sum()),
    "constant": (False, lambda w, x: jnp.ones(3)),
    "pmean": (False, lambda w, x: lax.pmean(x.sum(), "data")),
    "psum over both axes": (False, lambda w, x: lax.psum(x.sum(), ("data", "model"))),
    "psum over the other axis": (True, lambda w, x: lax.psum(x.sum(), "model")),
    "all_gather": (False, lambda w, x: lax.all_gather(x, "data")),
    "pmax": (False, lambda w, x: lax.pmax(x, "data")),
    "psum in groups": (
        True,
        lambda w, x: (
            lax.psum(w, "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
            * lax.axis_index("data")
        ),
    ),
    "psum_scatter": (True, lambda w, x: lax.psum_scatter(jnp.ones(8) * w, "data")),
    "axis_index": (True, lambda w, x: w + lax.axis_index("data")),
    "scan carries it in": (
        True,
        lambda w, x: lax.scan(lambda c, v: (c + v, None), w, x)[0],
    ),
    "scan over two steps": (
        True,
        lambda w, x: lax.scan(
            lambda c, _: ((c[1], x.sum()), None), (w, w), None, length=3
        )[0][0],
    ),
    "scan of equal things": (
        False,
        lambda w, x: lax.scan(lambda c, v: (c + v, c), w, jnp.ones(4))[1],
    ),
    "while with a shard's trip count": (
        True,
        lambda w, x: lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, w),
    ),
    "while of equal things": (
        False,
        lambda w, x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, w),
    ),
    "cond on a shard": (
        True,
        lambda w, x: lax.cond(x.sum() > 0, lambda: w, lambda: -w),
    ),
    "cond on parameters": (False, lambda w, x: lax.cond(w > 0, lambda: w, lambda: -w)),
    "jit, checkpoint and custom_jvp": (
        False,
        lambda w, x: jax.jit(jax.checkpoint(lambda v: jax.nn.relu(v)))(w),
    ),
    "a shard through jit": (True, lambda w, x: jax.jit(jax.nn.relu)(x).sum() + w),
    "equal random numbers": (
        False,
        lambda w, x: jax.random.normal(jax.random.key(0), (2,)) * w,
    ),
    "the reduced gradient": (
        False,
        lambda w, x: lax.pmean(jax.grad(lambda v: (v * x).sum())(w), "data"),
    ),
    "the local gradient": (True, lambda w, x: jax.grad(lambda v: (v * x).sum())(w)),
    "numbers from the device's own state": (
        True,
        lambda w, x: lax.rng_uniform(w, w, ()),
    ),
    "a host call": (
        True,
        lambda w, x: jax.pure_callback(
            lambda v: np.asarray(v), jax.ShapeDtypeStruct((), jnp.float32), w
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_between_devices(name):
    want, fn = CASES[name]
    assert varies(fn) is want


def test_collectives_are_found_at_any_depth():
    inside = trace(
        lambda x: lax.scan(lambda c, v: (c + lax.psum(v, "data"), None), 0.0, x)[0],
        jnp.ones(3),
    )
    assert reduces_over(inside, "data")
    assert not reduces_over(inside, "model")
    assert not reduces_over(trace(lambda x: x.sum(), jnp.ones(3)), "data")


def test_equations_inside_calls_and_loops_carry_their_last_marks():
    @jax.jit
    def double(x):
        return x * 2.0

    def fn(w, x):
        total, _ = lax.scan(lambda c, v: (jnp.sin(c) + v, None), w, x)
        return double(w), double(total)

    seen = varying_equations(trace(fn, 1.0, jnp.ones(4)), [False, True], "data")

    def marks(name):
        return [marks for eqn, marks in seen if eqn.primitive.name == name]

    assert (marks("sin"), marks("mul")) == ([[True]], [[False], [True]])
