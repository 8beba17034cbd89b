"""Where the rows of `compat.pmap` lie: one a device, and they stay there.

Other projects' tests look at values, and a plain `vmap` would pass most of them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import notices
from lockstep.compat import device_put_replicated, pmap, replicate

COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)


def pointers(array):
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def assert_one_row_a_device(array, devices=None, axis=0):
    devices = jax.devices() if devices is None else devices
    assert isinstance(array.sharding, NamedSharding)
    assert [s.device for s in array.addressable_shards] == list(devices)
    for row, shard in enumerate(array.addressable_shards):
        assert shard.data.shape[axis] == 1
        assert shard.index[axis].indices(len(devices))[:2] == (row, row + 1)
        np.testing.assert_array_equal(shard.data, np.asarray(array)[shard.index])


def square(x):
    return x @ x.T


X = np.arange(8 * 4 * 3, dtype=np.float32).reshape(8, 4, 3)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_device_works_on_its_own_row(count):
    lowered = pmap(square).lower(X[:count])
    text = lowered.as_text()
    assert f"mhlo.num_partitions = {count} " in text
    assert "mhlo.num_replicas = 1 " in text
    # What one device multiplies has no trace of the mapped axis.
    assert "tensor<4x3xf32>, tensor<3x4xf32>) -> tensor<4x4xf32>" in text
    compiled = lowered.compile()
    assert len(compiled.input_shardings[0][0].device_set) == count
    assert not COLLECTIVES.search(compiled.as_text())
    out = pmap(square)(X[:count])
    assert_one_row_a_device(out, jax.devices()[:count])


def test_the_function_is_compiled_for_n_devices_under_jit_too():
    text = jax.jit(pmap(square)).lower(X).as_text()
    assert "mhlo.num_partitions = 8 " in text


def test_a_mean_is_one_all_reduce_and_nothing_else():
    f = pmap(lambda w, x: w - lax.pmean(w * x.sum(), "i"), "i")
    text = f.lower(X[:, 0], X).compile().as_text()
    assert COLLECTIVES.findall(text) == ["all-reduce"]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_results_are_stacked_on_the_asked_axis(axis):
    out = pmap(lambda x: x, out_axes=axis)(X)
    assert_one_row_a_device(out, axis=axis)
    np.testing.assert_array_equal(out, np.moveaxis(X, 0, axis))


def test_out_axes_none_is_one_copy_on_each_device():
    out = pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(X)
    assert out.shape == (4, 3) and out.sharding.is_fully_replicated
    assert len(out.sharding.device_set) == 8
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, X.sum(0))


def test_the_state_stays_where_it_is():
    f = pmap(lambda s, x: (s + x.sum(), s[0]), "batch", donate_argnums=0)
    state = replicate(np.zeros(5, np.float32))
    assert_one_row_a_device(state)
    shardings, places = set(), []
    for _ in range(4):
        old = state
        state, _ = f(state, X)
        assert old.is_deleted()
        shardings.add(id(state.sharding))
        places.append(pointers(state))
    assert len(shardings) == 1, "the same sharding object at every step"
    # Donated memory is used again, on the same device.
    assert all(set(p) == set(places[0]) for p in places[1:])
    assert_one_row_a_device(state)


def test_arrays_in_place_are_passed_on_without_a_copy():
    identity = pmap(lambda x: x, "batch", donate_argnums=0)
    for x in (jnp.ones(3), pmap(lambda x: x + 1, "other")(X)):
        stacked = device_put_replicated(x, jax.devices())
        own = pmap(lambda x: x + 1, "batch")(stacked)  # put, a row may be on loan
        before = pointers(own)
        assert pointers(identity(own)) == before


def test_keys_are_mapped_one_a_device():
    keys = jax.random.split(jax.random.key(7), 8)
    out = pmap(jax.random.normal)(keys)
    assert_one_row_a_device(out)
    np.testing.assert_array_equal(out, [jax.random.normal(k) for k in keys])
    assert pmap(lambda k: k)(keys).dtype == keys.dtype


@pytest.mark.parametrize("axis_name", ["i", None])
def test_what_comes_from_the_host_goes_straight_to_its_device(axis_name):
    """Nothing passes through the first device, and nothing is left on it."""
    seen = []

    def recording(place):
        def record(what, layout, *rest):
            seen.extend(jax.tree.leaves(layout))
            return place(what, layout, *rest)

        return record

    uncommitted = jnp.asarray(X[:, 0])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("device_put", "make_array_from_callback"):
            patch.setattr(jax, name, recording(getattr(jax, name)))
        pmap(lambda x: x, axis_name)({"a": X, "b": uncommitted})
    first, second = seen
    assert first.spec == second.spec == P(first.mesh.axis_names[0])


def test_numpy_counts_as_an_implicit_transfer_as_in_jax_pmap():
    double = pmap(lambda x: 2 * x)
    placed = double(X)
    with jax.transfer_guard("disallow"):
        double(placed)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
            double(X)


def test_weak_types_come_and_go_as_they_are():
    state = {"w": replicate(jnp.ones(3, jnp.bfloat16)), "lr": replicate(0.5)}
    f = pmap(lambda s: {"w": s["w"] * s["lr"], "lr": s["lr"]})
    for _ in range(2):
        state = f(state)
    assert state["w"].dtype == jnp.bfloat16
    assert state["lr"].weak_type
    shared = pmap(lambda w, lr: w * lr, in_axes=(0, None))(state["w"], 0.5)
    assert shared.dtype == jnp.bfloat16


@pytest.mark.parametrize("axis_name", ["batch", None])
def test_an_array_that_is_donated_twice_is_copied_and_told_of_once(axis_name, caplog):
    """An average of the parameters begins as the parameters."""

    def step(state, shared):
        params, average = state["params"] + shared, state["average"]
        return {"params": params, "average": (average + params) / 2}

    notices.reset()
    mapped = pmap(step, axis_name, donate_argnums=0)
    params = replicate(np.zeros(3, np.float32))
    state = mapped({"params": params, "average": params}, replicate(2 * np.ones(3)))
    np.testing.assert_array_equal(state["params"], np.full((8, 3), 2))
    np.testing.assert_array_equal(state["average"], np.full((8, 3), 1))
    state = mapped(state, state["params"])
    np.testing.assert_array_equal(state["params"], np.full((8, 3), 4))
    (said,) = caplog.messages
    assert "state['params'], which is the same array as state['average']" in said
    assert "jax.numpy.copy" in said


def test_arrays_that_are_passed_twice_and_stay_are_not_copied(caplog):
    x = replicate(np.ones(3, np.float32))
    notices.reset()
    out = pmap(lambda s, x, y: s + x + y, donate_argnums=0)(x + 1, x, x)
    np.testing.assert_array_equal(out, np.full((8, 3), 4))
    assert not caplog.messages and not x.is_deleted()
