"""Sums over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepping import VIEWS, make, on_mesh

from lockstep.metrics import Mean
from lockstep.step.accumulate import sum_gradients
from lockstep.step.outcome import Outcome


def objective(params, model_state, batch, key):
    draw = 0.0 if key is None else jax.random.uniform(key)
    total = jnp.sum(params * batch)
    sums = Outcome(Mean(total, 1.0), {"draw": Mean(draw, 1.0)}, model_state, None)
    return total.astype(jnp.float32), sums


def test_gradients_and_means_are_added_whatever_k_is():
    batch = jnp.arange(8.0)
    for k in (1, 2, 4, 8):
        sums = sum_gradients(objective, jnp.float32(2.0), None, batch, None, k)
        assert float(sums.grads) == 28.0
        assert float(sums.loss.total) == 56.0 and float(sums.loss.count) == k


def test_microbatch_j_draws_with_its_own_key():
    key = jax.random.key(0)
    sums = sum_gradients(objective, jnp.ones(()), None, jnp.ones(4), key, 4)
    keys = [jax.random.fold_in(key, j) for j in range(4)]
    want = sum(float(jax.random.uniform(k)) for k in keys)
    assert float(sums.metrics["draw"].total) == pytest.approx(want)
    sums = sum_gradients(objective, jnp.ones(()), None, jnp.ones(4), key, 1)
    assert float(sums.metrics["draw"].total) == float(jax.random.uniform(key))


def test_16_bit_gradients_are_added_in_float32():
    # In bfloat16 the sum of 512 ones stops at 256.
    batch = jnp.ones(512, jnp.bfloat16)
    params = jnp.ones((), jnp.bfloat16)
    sums = sum_gradients(objective, params, None, batch, None, 512)
    assert sums.grads.dtype == jnp.float32 and float(sums.grads) == 512.0


@pytest.mark.parametrize("view", VIEWS)
def test_large_16_bit_losses_do_not_overflow(view):
    # 65,504 is float16's largest number; the gradients of the rows add up to 98,304.
    def loss(params, x):
        return params["w"] * x

    step = make(loss, view, accumulate=2)
    x = np.full(8192, 12.0, np.float16)
    state = step.init({"w": jnp.asarray(20.0, jnp.float16)})
    new, metrics = on_mesh(step, 4)(state, x)
    assert float(metrics["loss"]) == 240.0
    assert float(metrics["grad_norm"]) == 12.0
    assert float(new.params["w"]) == 8.0


def test_memory_for_activations_is_that_of_one_microbatch():
    def loss(params, x):
        for _ in range(8):
            x = jnp.tanh(x @ params["w"])
        return jnp.mean(x**2, axis=1)

    def temporary_bytes(k):
        step = make(loss, accumulate=k)
        state = step.init({"w": jnp.eye(64)})
        compiled = jax.jit(step).lower(state, jnp.ones((4096, 64))).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(8) < 0.4 * temporary_bytes(1)
