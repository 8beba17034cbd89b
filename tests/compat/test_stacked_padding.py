"""Any number of rows through a mapped function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lockstep.compat import pad_shard_unpad, pmap, replicate


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16])
def test_exactly_the_rows_that_went_in_come_out(count):
    forward = pad_shard_unpad(pmap(lambda w, x, *, y: {"out": x * w + y}))
    x = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    out = forward(replicate(np.float32(3)), x, y=x[:, :1])["out"]
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, 3 * x + x[:, :1])


def test_sums_over_the_batch_see_zeros_in_the_filling():
    def count(params, batch):
        return lax.psum(jnp.sum(batch["mask"] * batch["hit"]), "i")

    step = pad_shard_unpad(pmap(count, "i"), static_return=True)
    batch = {"mask": np.ones(13), "hit": np.ones(13)}
    assert step(replicate(0.0), batch).tolist() == [13] * 8


def test_short_batches_do_not_compile_again():
    traces = []

    @pad_shard_unpad
    @pmap
    def forward(params, x):
        traces.append(x.shape)
        return x + params

    params = replicate(np.float32(1))
    for rows in (24, 5, 17, 23):
        out = forward(params, np.zeros((rows, 2), np.float32), min_device_batch=3)
        assert out.shape == (rows, 2) and out.all()
    assert traces == [(3, 2)]


def test_arguments_that_are_passed_on_as_they_are():
    def scale(x, by, *, plus):
        return x * by + plus

    f = pad_shard_unpad(scale, static_argnums=(1,), static_argnames=("plus",))
    np.testing.assert_array_equal(f(np.arange(5), 2, plus=1), 2 * np.arange(5) + 1)
    assert f.__wrapped__ is scale


def test_rows_that_do_not_agree():
    f = pad_shard_unpad(pmap(lambda p, x, y: x))
    with pytest.raises(ValueError, match="has 4 rows and .* has 5"):
        f(replicate(1.0), np.ones(5), np.ones(4))


def test_keys_and_types_survive():
    f = pad_shard_unpad(lambda x: x, static_argnums=())
    for dtype in (np.uint8, jnp.bfloat16, np.int32):
        assert f(jnp.arange(5, dtype=dtype)).dtype == dtype
    assert jax.local_device_count() == 8
