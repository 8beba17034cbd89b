import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.doctor import AllReduce, check_sum, time_all_reduce


@pytest.mark.parametrize("count", [2, 8])
def test_times_a_right_all_reduce_of_the_stated_size(mesh_of, count):
    timing = time_all_reduce(mesh_of(count), 2**16, repeats=1)
    assert (timing.devices, timing.bytes) == (count, 2**16)
    assert 0 < timing.seconds < 60


def test_says_the_size_the_time_and_the_rate():
    timing = AllReduce(devices=8, bytes=2**24, seconds=0.016777216)
    assert str(timing) == "16 MiB a device over 8 devices: 16.78 ms, 1.00 GB/s"


def test_a_wrong_sum_on_one_device_is_named(mesh_of):
    mesh = mesh_of(4)
    copies = [jnp.full((1, 3), 10.0, device=d) for d in mesh.devices.flat]
    copies[2] = copies[2].at[0, 1].set(9.5)
    replicated = NamedSharding(mesh, P())
    total = jax.make_array_from_single_device_arrays((1, 3), replicated, copies)
    device = jax.devices()[2]
    with pytest.raises(RuntimeError, match=f"gave 9.5 on {device}, not 10: "):
        check_sum(total, 10.0)


def test_a_right_sum_passes(mesh_of):
    total = jax.device_put(jnp.full((1, 3), 10.0), NamedSharding(mesh_of(4), P()))
    check_sum(total, 10.0)
