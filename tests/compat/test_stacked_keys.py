"""One key a device: split, and made new on every device."""

import jax
import numpy as np
import pytest

from lockstep.compat import device_put_sharded, pmap, refresh_keys, shard_prng_key


def data(keys):
    typed = jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(keys) if typed else keys)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
class TestKeys:
    def test_every_device_gets_its_own(self, make):
        keys = shard_prng_key(make(0))
        assert len({tuple(k) for k in data(keys)}) == 8
        draws = pmap(jax.random.normal)(keys)
        assert len(set(np.asarray(draws).tolist())) == 8

    def test_refreshed_keys_are_new_and_different(self, make):
        keys, seen = shard_prng_key(make(0)), set()
        for _ in range(4):
            seen |= {tuple(k) for k in data(keys)}
            keys = refresh_keys(keys)
            assert keys.shape == shard_prng_key(make(0)).shape
        assert len(seen) == 32

    def test_they_are_what_splitting_on_each_device_gives(self, make):
        keys = shard_prng_key(make(3))
        want = [jax.random.split(key, 2)[0] for key in keys]
        assert [tuple(data(k)) for k in want] == [
            tuple(k) for k in data(refresh_keys(keys))
        ]

    def test_keys_on_the_devices_stay_there(self, make):
        devices = jax.devices()[2:6]
        keys = device_put_sharded(list(jax.random.split(make(0), 4)), devices)
        for _ in range(2):
            keys = refresh_keys(keys)
            assert [s.device for s in keys.addressable_shards] == devices
            assert [s.data.shape[0] for s in keys.addressable_shards] == [1] * 4

    def test_one_key_is_not_one_a_device(self, make):
        with pytest.raises(TypeError, match=r"not one key a device: .*shard_prng_key"):
            refresh_keys(make(0))
