"""What the jaxpr of a device-view step tells about its averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lockstep.debug.comparing import dataflow
from lockstep.debug.comparing.trials import Trial, read_call
from lockstep.parallel import per_device

X = np.arange(8, dtype=np.float32)
KEY = jax.random.key(0)


def body(fn, devices, *rest, state=np.float32(2)):  # noqa: B008
    step = per_device(fn)
    return Trial(step, devices).body(read_call(step, (state, X, *rest), {}))


def average(x):
    return lax.pmean(x, "data")


def test_draws_for_rows_and_for_others():
    def step(w, x, key):
        noise = jax.random.normal(KEY, (3,)).sum()  # not for the rows
        same = jax.random.normal(KEY, x.shape)

        def layer(carry, _):  # also inside a loop
            return carry + jax.random.normal(key, x.shape).sum(), None

        return w + average((x * same).mean() + lax.scan(layer, noise, None, 2)[0])

    draws = dataflow.row_draws(body(step, 1, KEY), body(step, 4, KEY))
    assert sorted(draws) == [((2,), False), ((2,), True)]


def test_draws_of_other_kinds():
    def step(w, x, key):
        shared = jax.random.gamma(KEY, jnp.ones(x.shape))
        words = jnp.tile(jax.random.key_data(KEY), 2)
        bits = lax.rng_bit_generator(words, x.shape)[1]
        own = lax.rng_uniform(0.0, 1.0, x.shape)
        return w + average((x * shared * bits * own).mean())

    draws = dataflow.row_draws(body(step, 1, KEY), body(step, 4, KEY))
    assert draws == [((2,), False), ((2,), False), ((2,), True)]


@jax.jit
def scale(x, factor):
    """Called twice, traced once."""
    return x * factor


def norm(x):
    return jnp.sqrt((x**2).sum())


@pytest.mark.parametrize(
    ("clips", "fn"),
    [
        (True, lambda g: average(g / norm(g))),
        (True, lambda g: average(jnp.where(norm(g) > 1, g / norm(g), g))),
        (True, lambda g: average(jnp.clip(g, -1, 1))),
        (True, lambda g: average(g * jnp.minimum(1, 1 / jnp.linalg.norm(g)))),
        (False, lambda g: average(g) / norm(average(g))),
        (False, lambda g: jnp.clip(average(g), -1, 1)),
        (False, lambda g: average(norm(g))),  # a loss that is a root
        (False, lambda g: average((g / norm(g)).mean())),  # inside a model
        (False, lambda g: average(jax.nn.relu(g).sum())),
        (False, lambda g: average(g * (1 + average(g).sum() ** 2) ** 0.5)),
        (False, lambda g: scale(average(scale(g, 2)), 1 / norm(average(g)))),
    ],
)
def test_clipping_before_averaging(clips, fn):
    step = body(lambda w, x: (w, fn(x * jnp.ones(3)[:, None])), 4)
    assert dataflow.clips_before_averaging(step) == clips


def test_dependence_on_other_devices():
    def step(state, x):
        w = state["a"]
        inside = jax.grad(lambda w: average((w * x).mean()))(w)
        alone = jax.jit(jax.grad(lambda w: (w * x).mean()))(w)
        looped = lax.fori_loop(0, 2, lambda _, v: v + average(alone), w)
        return {"a": inside, "b": alone, "c": looped}

    found = body(step, 4, state=dict.fromkeys("abc", np.float32(2)))
    depends = [dataflow.depends_on_other_devices(found, i) for i in range(3)]
    assert depends == [True, False, True]
