"""Sums with the same bits on every number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh_of
from jax.sharding import PartitionSpec as P

from lockstep.fixed_order import sealed, sum_devices, sum_parts
from lockstep.jaxprs.varying import equations

SHARDS = 8
COUNTS = (1, 2, 4, 8)


def add(left, right):
    return jax.tree.map(jnp.add, left, right)


def summed(parts, n: int, *, in_order: bool = True):
    """The sum of `[8, ...]` parts over n devices, each of which holds 8 / n."""

    def local(parts):
        mine = SHARDS // n

        def part(i):
            return jax.tree.map(lambda x: x[i], parts)

        if not in_order:
            return jax.lax.psum(jax.tree.map(lambda x: x.sum(0), parts), "data")
        return sum_devices(sum_parts(part, 0, mine, add), "data")

    mesh = make_mesh_of(n)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    return jax.device_get(jax.jit(mapped)(parts))


def random_parts(*shape: int):
    # Numbers of very different sizes: another order gives other bits.
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(scale=4, size=(SHARDS, *shape)))
    return (rng.normal(size=(SHARDS, *shape)) * sizes).astype(np.float32)


def by_hand(x):
    (a, b), (c, d), (e, f), (g, h) = x.reshape(4, 2, *x.shape[1:])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@pytest.mark.parametrize("n", COUNTS)
def test_the_sum_is_that_of_the_tree_by_hand(n):
    parts = {"a": random_parts(3, 5), "b": random_parts(), "c": random_parts(129)}
    total = summed(parts, n)
    for name, x in parts.items():
        np.testing.assert_array_equal(total[name], by_hand(x))


def test_the_usual_sums_depend_on_the_number_of_devices():
    parts = random_parts(1000)
    one, four = (summed(parts, n, in_order=False) for n in (1, 4))
    assert (one != four).any()


@pytest.mark.parametrize("n", (1, 8))
def test_every_dtype_is_added_in_its_own(n):
    parts = {
        "int": np.arange(8, dtype=np.int32) + 2**24,  # float32 would round these
        "half": np.full((8, 3), 0.1, jnp.bfloat16),
    }
    total = summed(parts, n)
    assert total["int"] == 28 + 2**27 and total["int"].dtype == np.int32
    assert total["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("n", COUNTS)
def test_minus_zero_stays(n):
    total = summed(np.full((8, 4), -0.0, np.float32), n)
    assert np.signbit(total).all()


def test_a_device_sends_as_much_as_in_a_ring():
    numbers = 8 * 1000
    jaxpr = jax.make_jaxpr(lambda x: sum_devices(x, "data"), axis_env=[("data", 8)])(
        jnp.zeros(numbers)
    )
    sent = [
        eqn.invars[0].aval.size
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "ppermute"
    ]
    assert sent == [4000, 2000, 1000]  # 7/8 of all; the gathering sends 7/8 again


def test_not_all_parts_are_in_memory_at_once():
    numbers, count = 100_000, 64

    def total(x):
        return sum_parts(lambda i: jnp.sin(x * i), 0, count, add)

    compiled = jax.jit(total).lower(jnp.ones(numbers)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < count // 2 * 4 * numbers


def test_sealed_keeps_a_multiply_and_an_add_apart():
    # One instruction for both rounds once; each by itself rounds twice.
    x, y = random_parts(500)[:2]

    def together(x, y):
        return x * 1.3 + y

    def apart(alive, x, y):
        return sealed(alive, lambda x: x * 1.3, jnp.zeros_like, x) + y

    twice = np.float32(1.3) * x + y
    assert (jax.jit(together)(x, y) != twice).any()
    np.testing.assert_array_equal(jax.jit(apart)(True, x, y), twice)
