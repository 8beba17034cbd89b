import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import notices
from lockstep.placement import (
    MaskedBatch,
    count_rows,
    pad_batch,
    replicate,
    shard_batch,
    to_host,
)


@dataclasses.dataclass
class Pair:  # not registered as a tree
    x: np.ndarray


def test_replicate_puts_one_equal_copy_on_every_device(mesh_of):
    placed = replicate({"w": np.arange(3.0, dtype=np.float32)}, mesh_of(8))
    shards = placed["w"].addressable_shards
    assert len({s.device for s in shards}) == 8
    assert all((np.asarray(s.data) == [0, 1, 2]).all() for s in shards)


def test_donating_a_replica_leaves_the_callers_array_alive(mesh_of):
    mine = {"w": jnp.ones(3), "key": jax.random.key(0), "host": np.ones(2, np.float32)}
    placed = replicate(mine, mesh_of(8))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    step(placed)
    assert placed["w"].is_deleted()
    assert not mine["w"].is_deleted() and mine["w"].sum() == 3
    assert mine["host"].sum() == 2


def aligned(shape):
    """Memory that a CPU device would borrow."""
    size = int(np.prod(shape)) * 4
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


def test_a_buffer_that_is_filled_anew_changes_nothing_placed(mesh_of):
    mine = aligned((64, 16))
    mine[:] = 1
    state, batch = replicate(mine, mesh_of(4)), shard_batch(mine, mesh_of(4))
    mine[:] = 7
    assert (np.asarray(state) == 1).all() and (np.asarray(batch) == 1).all()


def test_a_state_from_numpy_can_be_donated(mesh_of):
    placed = replicate(
        {"w": aligned((64, 16)), "b": np.ones(3, np.float32)}, mesh_of(4)
    )
    pointers = [s.data.unsafe_buffer_pointer() for s in placed["w"].addressable_shards]
    new = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(placed)
    reused = [s.data.unsafe_buffer_pointer() for s in new["w"].addressable_shards]
    assert reused == pointers


def test_replicating_a_replica_copies_it_too(mesh_of):
    first = replicate(jnp.ones(3), mesh_of(4))
    second = replicate(first, mesh_of(4))
    jax.jit(lambda x: x + 1, donate_argnums=0)(second)
    assert first.sum() == 3


def test_python_numbers_stay_weak_and_static_leaves_stay(mesh_of):
    placed = replicate(
        {"n": 3, "lr": 0.1, "z": 1j, "flag": True, "act": jnp.tanh, "no": None},
        mesh_of(2),
    )
    assert placed["n"].weak_type and placed["n"].dtype == jnp.int32
    assert placed["lr"].weak_type and placed["z"].weak_type
    assert placed["flag"] is True and placed["act"] is jnp.tanh and placed["no"] is None
    assert (jnp.ones(2, jnp.bfloat16) * to_host(placed["lr"])).dtype != jnp.float64
    assert (placed["lr"] * replicate(jnp.ones(2, jnp.bfloat16), mesh_of(2))).dtype == (
        jnp.bfloat16
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "bool"])
def test_narrow_dtypes_are_kept(mesh_of, dtype):
    assert replicate(jnp.ones(3, dtype), mesh_of(2)).dtype == dtype


def test_a_deleted_leaf_is_named(mesh_of):
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(
        RuntimeError, match=r"state\['w'\] was donated to an earlier call"
    ):
        replicate({"w": gone}, mesh_of(2))


def test_integers_that_do_not_fit_are_refused_by_leaf_and_value(mesh_of):
    with pytest.raises(OverflowError, match=r"state\['n'\] holds 2147483648,"):
        replicate({"n": 2**31}, mesh_of(2))
    batch = {"id": np.array([1, 2**40])}
    with pytest.raises(OverflowError, match=r"batch\['id'\] holds 1099511627776"):
        shard_batch(batch, mesh_of(2))
    fits = shard_batch({"id": np.array([1, -(2**31)])}, mesh_of(2))["id"]
    assert fits.dtype == jnp.int32 and int(fits[1]) == -(2**31)


def test_float64_is_narrowed_and_said_once(mesh_of, caplog):
    notices.reset()
    with caplog.at_level(logging.INFO, logger="lockstep"):
        shard_batch({"x": np.ones(2)}, mesh_of(2))
        shard_batch({"x": np.ones(2)}, mesh_of(2))
    said = [r for r in caplog.records if "float64" in r.getMessage()]
    assert len(said) == 1 and "batch['x']" in said[0].getMessage()


def test_nan_and_infinity_pass_through(mesh_of):
    x = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    np.testing.assert_array_equal(to_host(shard_batch(x, mesh_of(4))), x)


def test_rows_go_straight_to_their_devices(mesh_of):
    placed = shard_batch(np.arange(16).reshape(8, 2), mesh_of(4))
    assert [s.data.shape for s in placed.addressable_shards] == [(2, 2)] * 4
    assert placed.addressable_shards[3].data[0, 0] == 12


def test_any_tree_is_a_batch(mesh_of):
    batch = ({"x": np.ones((4, 2), np.float32)}, None, [np.arange(4)], 0.5, True)
    placed = shard_batch(batch, mesh_of(4))
    assert placed[1] is None and placed[4] is True
    assert placed[3].sharding.is_fully_replicated
    assert not placed[2][0].sharding.is_fully_replicated


def test_a_batch_of_keys_is_split(mesh_of):
    keys = jax.random.split(jax.random.key(0), 4)
    placed = shard_batch({"k": keys}, mesh_of(4))["k"]
    assert placed.addressable_shards[1].data.shape == (1,)
    assert (jax.random.key_data(placed) == jax.random.key_data(keys)).all()


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": np.ones(10)}, r"batch\['x'\] has 10 rows; the 4 devices on 'data' need"),
        ({"x": np.ones(10)}, "or 8 or 12 rows"),
        ({"x": np.ones(2)}, r"has 2 rows; .* multiple of 4: .* or 4 rows"),
        (
            {"x": np.ones(8), "y": np.ones(4)},
            r"batch\['y'\] has 4 rows and batch\['x'\]",
        ),
        ({"x": np.ones((0, 3))}, "0 rows"),
        ({}, "no array with rows"),
        ({"lr": 0.1}, "no array with rows"),
        ({"x": np.ones(4), "t": np.array(list("abcd"))}, r"batch\['t'\] is text"),
        ({"x": np.ones(4), "t": "name"}, r"batch\['t'\] is text"),
        ({"x": np.array([None] * 4)}, r"batch\['x'\] is text or objects"),
        ({"x": np.zeros(4, [("a", "f4")])}, r"batch\['x'\] is text or objects"),
        ({"x": np.ones(4), "p": Pair(np.ones(4))}, r"\['p'\] is a Pair.*register_data"),
    ],
)
def test_a_bad_batch_gets_one_clear_message(mesh_of, batch, text):
    with pytest.raises(ValueError, match=text):
        shard_batch(batch, mesh_of(4))


def test_what_numpy_can_read_is_an_array(mesh_of):
    class Column:
        shape, dtype = (4,), np.float32

        def __array__(self, dtype=None, copy=None):
            return np.arange(4, dtype=np.float32)

    placed = shard_batch({"x": Column()}, mesh_of(4))
    np.testing.assert_array_equal(placed["x"], range(4))


def test_an_unknown_axis_or_remainder_is_refused(mesh_of):
    with pytest.raises(ValueError, match=r"no axis 'dta'; its axes are \{'data': 2\}"):
        shard_batch(np.ones(4), mesh_of(2), axis_name="dta")
    with pytest.raises(ValueError, match="remainder='cut' is not one of"):
        shard_batch(np.ones(4), mesh_of(2), remainder="cut")


def test_pad_repeats_a_real_row_and_masks_it(mesh_of):
    placed = shard_batch(
        {"x": np.array([5.0, 6, 7], np.float32)}, mesh_of(4), remainder="pad"
    )
    assert isinstance(placed, MaskedBatch)
    np.testing.assert_array_equal(placed.data["x"], [5, 6, 7, 7])
    np.testing.assert_array_equal(placed.mask, [1, 1, 1, 0])


def test_pad_masks_full_batches_too_so_that_the_shape_is_one(mesh_of):
    placed = shard_batch(np.ones(4, np.float32), mesh_of(4), remainder="pad")
    assert placed.mask.sum() == 4


def test_drop_keeps_whole_shards_or_nothing_and_says_so_once(mesh_of, caplog):
    kept = shard_batch(np.arange(10), mesh_of(4), remainder="drop")
    np.testing.assert_array_equal(kept, range(8))
    assert shard_batch(np.arange(3), mesh_of(4), remainder="drop") is None
    (said,) = [r.getMessage() for r in caplog.records]
    assert "the last 2 of 10 rows of a batch are left out, for 4 rows make" in said


def test_unsplit_replicates_only_what_does_not_divide(mesh_of):
    short = shard_batch(np.arange(3), mesh_of(4), remainder="unsplit")
    full = shard_batch(np.arange(8), mesh_of(4), remainder="unsplit")
    assert short.sharding.is_fully_replicated and short.shape == (3,)
    assert not full.sharding.is_fully_replicated


def test_microbatches_count_into_the_multiple(mesh_of):
    text = "times 2 microbatches or shards need a multiple of 8"
    with pytest.raises(ValueError, match=text):
        shard_batch(np.ones(12), mesh_of(4), multiple=2)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), multiple=st.integers(1, 9), least=st.integers(0, 30))
def test_padding_keeps_every_row_in_order(rows, multiple, least):
    padded = pad_batch({"x": np.arange(rows)}, multiple, at_least=least)
    n = count_rows(padded.data)
    assert n % multiple == 0 and n >= max(rows, least)
    assert n - max(rows, least) < multiple
    np.testing.assert_array_equal(padded.data["x"][padded.mask == 1], np.arange(rows))
    assert (padded.data["x"][padded.mask == 0] == rows - 1).all()


def test_to_host_names_a_deleted_leaf(mesh_of):
    state = replicate({"w": np.ones(2, np.float32)}, mesh_of(2))
    state["w"].delete()
    with pytest.raises(RuntimeError, match=r"tree\['w'\] was donated to an earlier"):
        to_host(state)


def test_to_host_gives_whole_numpy_arrays_and_keeps_keys(mesh_of):
    key = jax.random.key(3)
    placed = replicate({"k": key, "w": np.ones(2, np.float32), "s": "x"}, mesh_of(4))
    host = to_host(placed)
    assert isinstance(host["w"], np.ndarray) and host["s"] == "x"
    assert (jax.random.key_data(host["k"]) == jax.random.key_data(key)).all()
    assert len(host["k"].devices()) == 1
    rows = shard_batch(np.arange(8), mesh_of(4))
    np.testing.assert_array_equal(to_host(rows), range(8))
