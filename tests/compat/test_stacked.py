"""Stacked trees: values, types and places of the helpers of the pmap era."""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import compat
from lockstep.compat import (
    device_put_replicated,
    device_put_sharded,
    get_metrics,
    onehot,
    pmap,
    prefetch_to_device,
    replicate,
    shard,
    stack_forest,
    unreplicate,
)

DEVICES = jax.local_devices()


def borrowed(*shape):
    """NumPy memory aligned so that a CPU device takes it as it is, without a copy."""
    buffer = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return (
        buffer[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)
    )


def assert_rows(array, rows, devices=DEVICES):
    """Row i of the array is `rows[i]`, alone on device i."""
    assert array.committed and len(array.addressable_shards) == len(devices)
    for shard_, row, device in zip(
        array.addressable_shards, rows, devices, strict=True
    ):
        assert shard_.device == device and shard_.data.shape == (1, *np.shape(row))
        np.testing.assert_array_equal(shard_.data[0], row)


class TestReplicated:
    @pytest.mark.parametrize("order", [slice(None), slice(2, 5), slice(None, None, -1)])
    def test_row_i_on_device_i(self, order):
        devices = DEVICES[order]
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        for source in (x, jnp.asarray(x), jax.device_put(x, jax.devices()[4])):
            out = device_put_replicated({"x": source}, devices=tuple(devices))["x"]
            assert out.shape == (len(devices), 2, 3)
            assert_rows(out, [x] * len(devices), devices)
            assert pmap(lambda x: x, devices=devices)(out).sharding.mesh.size

    @pytest.mark.parametrize(
        ("value", "dtype", "weak"),
        [
            (1, "int32", True),
            (0.5, "float32", True),
            (1j, "complex64", True),
            (True, "bool", False),
            (jnp.asarray(0.5), "float32", True),
            (np.float64(0.5), "float32", False),
            (np.int64(3), "int32", False),
            (np.array(2, np.uint8), "uint8", False),
            (np.ones(2, np.float16), "float16", False),
            (np.ones((0, 3), bool), "bool", False),
            (jnp.ones(2, jnp.bfloat16), "bfloat16", False),
            (jax.random.PRNGKey(0), "uint32", False),
        ],
    )
    def test_types(self, value, dtype, weak):
        for out in (
            device_put_replicated(value, DEVICES),
            device_put_sharded([value] * 8, DEVICES),
        ):
            assert (str(out.dtype), out.weak_type) == (dtype, weak)
            assert_rows(out, [value] * 8)

    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
    def test_typed_keys(self, impl):
        key = jax.random.key(3, impl=impl)
        out = replicate(key)
        assert out.dtype == key.dtype and out.shape == (8,)
        assert bool((jax.random.key_data(out) == jax.random.key_data(key)).all())
        assert unreplicate(out).dtype == key.dtype

    def test_trees_keep_their_types(self):
        class Pair(NamedTuple):
            left: object
            right: object

        state = optax.adam(0.1).init({"w": jnp.ones(2)})
        tree = {"pair": Pair(1, None), "empty": {}, "f": freeze({"a": 2.0}), "o": state}
        out = replicate(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        assert isinstance(out["f"], FrozenDict) and isinstance(out["pair"], Pair)

    def test_an_array_that_is_spread_already(self, mesh_of):
        mesh = mesh_of(8, {"a": 4, "b": 2})
        x = np.arange(8, dtype=np.float32).reshape(4, 2)
        spread = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
        assert_rows(device_put_replicated(spread, DEVICES[4:]), [x] * 4, DEVICES[4:])

    def test_the_source_is_neither_shared_nor_deleted(self):
        host, device = borrowed(64), jnp.ones(64)
        out = replicate((host, device))
        host[0] = 5
        assert float(out[0].max()) == 0
        pmap(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)(out)
        assert not device.is_deleted()

    def test_no_device_holds_more_than_two_copies(self, monkeypatch):
        """The source and one row: the stack never lies on one device."""
        put, given = jax.device_put, []

        def record(x, *args, **kwargs):
            given.extend(jax.tree.leaves(x))
            return put(x, *args, **kwargs)

        monkeypatch.setattr(jax, "device_put", record)
        x = np.ones(1 << 10, np.float32)
        for source in (jnp.asarray(x), x):
            given.clear()
            out = replicate(source)
            assert {s.data.nbytes for s in out.addressable_shards} == {x.nbytes}
            if source is x:
                (host,) = given
                assert host.strides[0] == 0, "one copy on the host serves all devices"
            else:
                assert max(leaf.nbytes for leaf in given) == x.nbytes

    @pytest.mark.parametrize(
        "devices", [[], np.array(DEVICES), iter(DEVICES), DEVICES[0]]
    )
    def test_devices_are_a_sequence(self, devices):
        with pytest.raises(ValueError, match="must be a non-empty sequence"):
            device_put_replicated(1, devices)

    def test_a_device_named_twice(self):
        with pytest.raises(ValueError, match="names one twice"):
            device_put_replicated(np.ones(2), [DEVICES[0]] * 2)

    @pytest.mark.parametrize(
        ("leaf", "error"),
        [
            ("adam", TypeError),
            (object(), TypeError),
            (jax.ShapeDtypeStruct((2,), jnp.float32), TypeError),
            (2**40, OverflowError),
        ],
    )
    def test_what_is_no_array(self, leaf, error):
        with pytest.raises(error):
            device_put_replicated({"x": leaf}, DEVICES)

    def test_a_deleted_array(self):
        x = jnp.ones(3)
        x.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            replicate(x)


class TestSharded:
    def test_trees_and_lists(self):
        shards = [{"x": np.full(3, i, np.float32), "l": [i, None]} for i in range(8)]
        out = device_put_sharded(shards, np.array(DEVICES))
        assert_rows(out["x"], [s["x"] for s in shards])
        assert out["l"][0].tolist() == list(range(8)) and out["l"][0].weak_type
        assert out["l"][1] is None

    def test_rows_that_lie_on_their_devices_stay_there(self):
        rows = [jax.device_put(np.full(4, i), d) for i, d in enumerate(DEVICES)]
        with jax.transfer_guard("disallow_explicit"):
            out = device_put_sharded(rows, DEVICES)
        assert_rows(out, rows)

    def test_one_key_a_device(self):
        keys = list(jax.random.split(jax.random.key(0), 8))
        out = device_put_sharded(keys, DEVICES)
        assert out.shape == (8,) and out[5] == keys[5]

    @pytest.mark.parametrize("shards", [np.ones((8, 2)), jnp.ones((8, 2)), range(8)])
    def test_the_shards_are_a_list(self, shards):
        if isinstance(shards, range):
            assert device_put_sharded(shards, DEVICES).tolist() == list(range(8))
            return
        with pytest.raises(TypeError, match="must be a sequence"):
            device_put_sharded(shards, DEVICES)

    def test_as_many_shards_as_devices(self):
        with pytest.raises(
            ValueError, match=r"len\(shards\) = 3 .* len\(devices\) = 4"
        ):
            device_put_sharded([np.ones(2)] * 3, DEVICES[:4])
        with pytest.raises(ValueError, match="at least one"):
            device_put_sharded([], [])

    @pytest.mark.parametrize(
        ("odd", "text"),
        [
            ({"x": np.ones(3)}, r"shards\[0\]\['x'\] is float32\[2\] and shards\[2\]"),
            ({"x": np.ones(2, int)}, r"shards\[2\]\['x'\] is int32\[2\]"),
        ],
    )
    def test_shards_that_differ(self, odd, text):
        shards = [{"x": np.ones(2)}] * 2 + [odd]
        with pytest.raises(ValueError, match=text):
            device_put_sharded(shards, DEVICES[:3])

    @pytest.mark.parametrize("rows", [[1, 2.0], [1.0, np.float32(2)]])
    def test_weak_and_strong_do_not_mix(self, rows):
        with pytest.raises(ValueError, match="must be alike"):
            device_put_sharded(rows, DEVICES[:2])
        mixed = [np.float64(1), jnp.float32(2)]
        assert device_put_sharded(mixed, DEVICES[:2]).dtype == jnp.float32

    def test_from_many_threads(self):
        results = {}

        def put(n):
            results[n] = device_put_sharded([np.full(4, n)] * 8, DEVICES)

        threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [int(results[n][7, 0]) for n in range(8)] == list(range(8))


class TestUnreplicate:
    def test_it_reads_one_shard_and_asks_nobody(self):
        out = replicate({"w": np.arange(3, dtype=np.float32), "n": 4})
        with jax.transfer_guard("disallow"):
            one = unreplicate(out)
        assert one["w"].devices() == one["n"].devices() == {DEVICES[0]}
        assert one["w"].tolist() == [0, 1, 2] and one["n"].shape == ()

    def test_on_other_devices_and_with_rows_to_spare(self):
        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        mesh = Mesh(DEVICES[3:7], ("i",))
        two_rows = jax.device_put(x, NamedSharding(mesh, P("i")))
        assert unreplicate(two_rows).tolist() == [0, 1]
        assert unreplicate(two_rows).devices() == {DEVICES[3]}

    def test_a_row_that_is_split_itself(self):
        nested = pmap(pmap(lambda x: x, "j"), "i")(np.arange(8.0).reshape(4, 2))
        assert unreplicate(nested).tolist() == [0, 1]

    def test_arrays_of_the_host_and_of_one_device(self):
        host = unreplicate({"a": np.ones((8, 2)), "b": np.arange(8), "c": 1.0})
        assert host["a"].shape == (2,) and host["b"] == 0 and host["c"] == 1.0
        assert unreplicate(jnp.ones((8, 2))).shape == (2,)
        one = pmap(lambda x: x)(np.ones((1, 2)))
        assert unreplicate(one).shape == (2,)

    def test_under_jit(self):
        assert jax.jit(unreplicate)(replicate(np.ones(3))).shape == (3,)

    def test_what_is_the_same_on_all_devices_has_no_row_to_take(self, mesh_of):
        everywhere = NamedSharding(mesh_of(4), P())
        x = jax.device_put(np.arange(3), everywhere)
        view = unreplicate(x)
        assert view.tolist() == [0, 1, 2] and len(view.devices()) == 1
        pointer = x.addressable_shards[0].data.unsafe_buffer_pointer()
        assert view.unsafe_buffer_pointer() == pointer, "a view, not a copy"
        assert unreplicate(jax.device_put(2.0, everywhere)) == 2.0

    def test_nobody_can_tell_where_the_leading_axis_could_be_the_devices(self, mesh_of):
        x = jax.device_put(np.ones((4, 2)), NamedSharding(mesh_of(4), P()))
        with pytest.raises(
            ValueError, match=r"tree\['w'\] \[4, 2\] is the same on all 4"
        ):
            unreplicate({"w": x})


class TestPrefetch:
    def test_batches_come_in_order_and_placed(self):
        batches = [{"x": np.full((8, 4), i, np.float32)} for i in range(5)]
        for size in (1, 2, 10):
            out = list(prefetch_to_device(iter(batches), size))
            assert [float(b["x"][0, 0]) for b in out] == [0, 1, 2, 3, 4]
            assert_rows(out[3]["x"], batches[3]["x"])

    def test_it_is_so_many_batches_ahead(self):
        taken = []

        def source():
            for i in range(6):
                taken.append(i)
                yield np.full(8, i)

        batches = prefetch_to_device(source(), 3)
        assert taken == []
        next(batches)
        assert taken == [0, 1, 2]
        next(batches)
        assert taken == [0, 1, 2, 3]

    def test_memory_that_the_loader_uses_again(self):
        buffer = borrowed(8, 64)
        batches = prefetch_to_device((buffer for _ in range(3)), 2)
        first = next(batches)
        buffer[:] = 7
        assert float(first.max()) == 0

    def test_some_devices_and_arrays_of_one_device(self):
        x = jnp.arange(6.0).reshape(2, 3)
        (out,) = prefetch_to_device([x], 2, devices=DEVICES[6:])
        assert_rows(out, x, DEVICES[6:])

    def test_rows_that_are_not_the_devices(self):
        with pytest.raises(ValueError, match=r"batch\['x'\] .*\(16, 2\).* 8 devices"):
            next(prefetch_to_device([{"x": np.ones((16, 2))}], 2))

    def test_an_error_of_the_loader(self):
        def source():
            yield np.ones(8)
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            list(prefetch_to_device(source(), 1))


class TestSmallHelpers:
    def test_shard(self):
        batch = {"x": np.arange(32).reshape(16, 2), "y": jnp.arange(16)}
        out = shard(batch)
        assert out["x"].shape == (8, 2, 2) and out["y"].shape == (8, 2)
        np.testing.assert_array_equal(out["x"].reshape(16, 2), batch["x"])

    @pytest.mark.parametrize("x", [np.ones((10, 2)), np.float32(1), 3, "a name"])
    def test_shard_says_which_leaf_does_not_divide(self, x):
        with pytest.raises(ValueError, match=r"xs\['x'\] .* a multiple of 8 rows"):
            shard({"x": x})

    def test_metrics_come_back_as_numpy_over_time(self):
        step = pmap(lambda x: {"loss": jax.lax.pmean(x, "i")}, "i")
        metrics = get_metrics([step(np.full(8, i, np.float32)) for i in range(3)])
        assert isinstance(metrics["loss"], np.ndarray)
        assert metrics["loss"].tolist() == [0, 1, 2]

    def test_stack_forest(self):
        out = stack_forest([{"a": np.ones(2), "b": 1}, {"a": np.zeros(2), "b": 2}])
        assert out["a"].tolist() == [[1, 1], [0, 0]] and out["b"].tolist() == [1, 2]
        assert isinstance(out["b"], np.ndarray)

    def test_onehot(self):
        out = onehot(np.array([[0, 2]]), 3, on_value=0.9, off_value=0.05)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, [[[0.9, 0.05, 0.05], [0.05, 0.05, 0.9]]])
        assert onehot(jnp.array(5), 3).tolist() == [0, 0, 0]


def test_flax_says_the_same():
    """What still stands in Flax agrees, and so may stay in place."""
    from flax import jax_utils
    from flax.training import common_utils

    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.ones(4)}
    ours, theirs = replicate(tree), jax_utils.replicate(tree)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(
        np.testing.assert_array_equal, unreplicate(theirs), jax_utils.unreplicate(ours)
    )
    labels = np.array([1, 0, 3])
    np.testing.assert_array_equal(onehot(labels, 4), common_utils.onehot(labels, 4))
    batch = np.arange(32).reshape(16, 2)
    np.testing.assert_array_equal(shard(batch), common_utils.shard(batch))
    key = jax.random.key(1)
    assert bool((compat.shard_prng_key(key) == common_utils.shard_prng_key(key)).all())
