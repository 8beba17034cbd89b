import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lockstep.compat import pmap
from lockstep.placement import replicate, shard_batch
from lockstep.replicas import ReplicaMismatch, check_replicas


def drifted(mesh, copies):
    """An array that claims to be replicated and holds `copies[i]` on device i."""
    where = jax.sharding.NamedSharding(mesh, P())
    parts = [
        jax.device_put(c, d) for c, d in zip(copies, mesh.devices.flat, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(parts[0].shape, where, parts)


def test_equal_copies_of_every_kind_of_leaf_pass(mesh_of):
    check_replicas(
        replicate(
            {
                "key": jax.random.key(0),
                "step": 3,
                "flag": np.array([True, False]),
                "half": jnp.ones(3, jnp.bfloat16),
                "small": jnp.arange(5, dtype=jnp.int8),
                "complex": np.array([1 + 2j], np.complex64),
                "nan": np.array([np.nan, 1.0], np.float32),
                "empty": np.zeros((0, 3), np.float32),
                "static": "text",
            },
            mesh_of(8),
        )
    )


def test_the_message_names_leaf_devices_index_and_size(mesh_of):
    bad = drifted(mesh_of(4), [np.float32(i) for i in range(4)])
    assert bad.is_fully_replicated
    with pytest.raises(ReplicaMismatch) as error:
        check_replicas({"mean": bad})
    assert str(error.value).startswith(
        "state['mean']: devices 1, 2, 3 differ from 0, first at index 0, "
        "max abs difference 3"
    )


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8"]
)
def test_one_flipped_bit_in_one_copy_is_found(mesh_of, dtype):
    good = np.asarray(jnp.linspace(1, 9, 60).astype(dtype)).reshape(6, 10)
    bad = good.copy()
    bits = bad.view(f"u{bad.dtype.itemsize}")
    bits[4, 7] ^= 1
    copies = [good] * 5 + [bad] + [good] * 2
    with pytest.raises(
        ReplicaMismatch, match=r"device 5 differ from 0, first at index \[4, 7\]"
    ):
        check_replicas(drifted(mesh_of(8), copies))


def test_swapped_and_cancelling_changes_are_found(mesh_of):
    good = np.array([1.0, 2.0, 3.0], np.float32)
    for bad in (good[::-1].copy(), good + np.array([1, 0, -1], np.float32)):
        with pytest.raises(ReplicaMismatch):
            check_replicas(drifted(mesh_of(2), [good, bad]))


def test_differing_keys_and_flags_are_found(mesh_of):
    keys = [jax.random.key(i) for i in (0, 0, 1, 0)]
    with pytest.raises(ReplicaMismatch, match=r"\['key'\]: device 2 differ"):
        check_replicas({"key": drifted(mesh_of(4), keys)})
    flags = [np.array(i != 1) for i in range(4)]
    with pytest.raises(ReplicaMismatch, match="device 1 differ"):
        check_replicas(drifted(mesh_of(4), flags))


def test_nan_equals_nan_and_minus_zero_is_not_zero(mesh_of):
    other_nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    check_replicas(drifted(mesh_of(2), [np.array([np.nan], np.float32), other_nan]))
    with pytest.raises(ReplicaMismatch):
        zeros = [np.array([0.0], np.float32), np.array([-0.0], np.float32)]
        check_replicas(drifted(mesh_of(2), zeros))
    with pytest.raises(ReplicaMismatch, match="difference inf"):
        mixed = [np.array([1.0], np.float32), np.array([np.nan], np.float32)]
        check_replicas(drifted(mesh_of(2), mixed))


def test_a_tolerance_forgives_rounding_only(mesh_of):
    near = drifted(mesh_of(2), [np.float32(1.0), np.float32(1.0 + 1e-6)])
    check_replicas(near, tolerance=1e-5)
    with pytest.raises(ReplicaMismatch):
        check_replicas(near)
    with pytest.raises(ReplicaMismatch):
        check_replicas(near, tolerance=1e-8)


def test_shards_are_no_replicas_and_pass(mesh_of):
    check_replicas(shard_batch(np.arange(8.0, dtype=np.float32), mesh_of(8)))
    check_replicas({"host": np.ones(3), "one device": jnp.ones(3)})


def test_a_deleted_leaf_is_named(mesh_of):
    state = replicate({"w": np.ones(2, np.float32)}, mesh_of(2))
    state["w"].delete()
    with pytest.raises(RuntimeError, match=r"state\['w'\] was donated to an earlier"):
        check_replicas(state)


def test_copies_along_the_other_axis_of_a_mesh_are_compared(mesh_of):
    mesh = mesh_of(4, {"data": 2, "model": 2})
    where = jax.sharding.NamedSharding(mesh, P("model"))
    parts = [np.float32([0]), np.float32([1]), np.float32([0]), np.float32([7])]
    arrays = [
        jax.device_put(p, d) for p, d in zip(parts, mesh.devices.flat, strict=True)
    ]
    bad = jax.make_array_from_single_device_arrays((2,), where, arrays)
    with pytest.raises(ReplicaMismatch, match="device 3 differ from 1"):
        check_replicas(bad)


def test_stacked_copies_are_compared_row_by_row():
    rows = np.ones((4, 3), np.float32)
    mapped = pmap(lambda x: {"w": x}, devices=jax.devices()[:4])
    check_replicas(mapped(rows), stacked=True)
    rows.view(np.uint32)[2, 1] ^= 1
    with pytest.raises(
        ReplicaMismatch,
        match=r"state\['w'\]: device 2 differ from 0, first at .* \[1\]",
    ):
        check_replicas(mapped(rows), stacked=True)
    check_replicas({"host": rows, "n": 3}, stacked=True)


def test_at_most_64_bytes_of_a_leaf_leave_each_device(mesh_of, monkeypatch):
    read = []
    whole = np.asarray

    def note(x, *args, **kwargs):
        value = whole(x, *args, **kwargs)
        if isinstance(x, jax.Array):
            read.append(value.nbytes)
        return value

    state = replicate({"w": np.ones(10_000), "b": np.ones(100)}, mesh_of(8))
    monkeypatch.setattr(np, "asarray", note)
    check_replicas(state)
    assert read and sum(read) <= 64 * 2 * 8
