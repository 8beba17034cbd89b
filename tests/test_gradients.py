"""Averaging, norm and clipping of gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.step.gradients import average, clip, global_norm


def test_the_norm_is_taken_in_32_bits():
    small, large = jnp.full(4096, 0.1, jnp.bfloat16), jnp.full(3, 300.0, jnp.float16)
    want = np.sqrt(4096 * float(jnp.bfloat16(0.1)) ** 2 + 3 * 300.0**2)
    assert float(global_norm((small, large))) == np.float32(want)


def test_the_norm_of_complex_leaves_is_real():
    norm = global_norm(jnp.array([3 + 4j], jnp.complex64))
    assert norm.dtype == jnp.float32 and norm == 5.0


def test_clipping_keeps_short_gradients_to_the_bit_and_shortens_long_ones():
    grads = {"a": jnp.array([0.1, 0.7]), "b": jnp.array(0.3)}
    norm = global_norm(grads)
    for limit in (None, 1.0, float(norm)):
        jax.tree.map(np.testing.assert_array_equal, clip(grads, norm, limit), grads)
    np.testing.assert_allclose(global_norm(clip(grads, norm, 0.5)), 0.5, rtol=1e-6)
    assert clip(jnp.ones(2, jnp.bfloat16), jnp.float32(2), 1.0).dtype == jnp.bfloat16


def test_where_nothing_counts_the_sum_stays_as_it_is():
    assert average(jnp.float32(0.0), jnp.float32(0.0)) == 0.0
    assert average(jnp.float32(6.0), jnp.float32(1.5), 4.0) == 1.0
