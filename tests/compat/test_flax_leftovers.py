"""The helpers of `flax.jax_utils` that have nothing to do with devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils

from lockstep.compat import partial_eval_by_shape, scan_in_dim

X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("axis", "unroll"), [(0, 1), ((1,), (2,)), ((2, 0), (1,)), ((2, 0, 1), (1, 2, 3))]
)
@pytest.mark.parametrize("keepdims", [False, True])
def test_scanning_along_any_axes(axis, unroll, keepdims):
    def body(carry, x):
        carry = carry * 0.5 + x.sum()
        return carry, {"y": x * carry}

    options = {"axis": axis, "unroll": unroll, "keepdims": keepdims}
    got = scan_in_dim(body, jnp.float32(1), X, **options)
    want = jax_utils.scan_in_dim(body, jnp.float32(1), X, **options)
    jax.tree.map(np.testing.assert_allclose, got, want)


def test_what_is_known_from_shapes():
    def init(x, y, key, *, scale):
        w = scale * jax.random.normal(key, (x.shape[-1], y.shape[-1]))
        return {"w": w, "out": x @ w, "rows": jnp.full((), x.shape[0]), "y": y}

    specs = [(5, 3), ((5, 2), jnp.int32)]
    got = partial_eval_by_shape(init, specs, jax.random.key(0), scale=2.0)
    want = jax_utils.partial_eval_by_shape(init, specs, jax.random.key(0), scale=2.0)
    np.testing.assert_array_equal(got["w"], want["w"])
    assert got["rows"] == 5
    assert got["out"] == jax.ShapeDtypeStruct((5, 2), jnp.float32)
    assert got["y"] == jax.ShapeDtypeStruct((5, 2), jnp.int32)


def test_the_inputs_are_not_computed_with():
    def init(x):
        return jnp.ones(2), jax.pure_callback(ran.append, None, x)

    ran = []
    ones, _ = partial_eval_by_shape(init, [(4,)])
    assert ones.tolist() == [1, 1] and not ran
