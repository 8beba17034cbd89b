"""Keys of steps, devices and streams; host generators."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lockstep.rng import device_key, host_rng, step_key, stream

NOTHING: list[Any] = [0, None, 1.0]  # neither keys nor steps nor names
KINDS = [jax.random.key, jax.random.PRNGKey]


def words(key) -> tuple[int, ...]:
    data = jax.random.key_data(key) if key.dtype != jnp.uint32 else key
    return tuple(int(word) for word in np.ravel(data))


@pytest.mark.parametrize("make", KINDS)
def test_step_key_is_fold_in_for_typed_and_raw_keys_and_any_integer(make):
    base = make(3)
    want = jax.random.fold_in(base, 7)
    for step in (7, np.int64(7), jnp.int32(7)):
        assert words(step_key(base, step)) == words(want)
        assert step_key(base, step).dtype == base.dtype
    traced = jax.jit(step_key)(base, jnp.int32(7))
    assert words(traced) == words(want)


def test_typed_and_raw_keys_of_one_seed_draw_the_same():
    for fold in (lambda k: step_key(k, 5), lambda k: stream(k, "noise")):
        typed, raw = (words(fold(make(0))) for make in KINDS)
        assert typed == raw


def test_steps_streams_devices_and_microbatches_have_keys_of_their_own():
    base = jax.random.key(0)
    names = ["dropout", "noise", "droput", "a", "b", "ab", "0", "1", "ünïcode"]
    steps = [step_key(base, i) for i in range(40)] + [step_key(base, 2**31 - 1)]
    keys = [base, *steps, *(stream(base, name) for name in names)]
    keys += [stream(key, name) for key in steps[:5] for name in names]
    keys += [stream(stream(base, a), b) for a in "ab" for b in "ab"]
    keys += [
        jax.random.fold_in(key, device) for key in steps[:5] for device in range(8)
    ]
    assert len({words(key) for key in keys}) == len(keys)


def test_a_stream_is_reproducible_and_its_definition_fixed():
    # Stored runs rely on it: the branch 2**31, then the name's SHA-256 in two words.
    key = jax.random.fold_in(jax.random.key(0), np.uint32(2**31))
    for word in (0x290A4C1B, 0xB93FC93B):
        key = jax.random.fold_in(key, np.uint32(word))
    assert words(stream(jax.random.key(0), "dropout")) == words(key)


@pytest.mark.parametrize("make", KINDS)
def test_device_keys_differ_between_devices_and_steps(make, mesh_of):
    def draws(key, step):
        bits = jax.random.bits(device_key(step_key(key, step)), (2,))
        return bits[None]

    mapped = jax.jit(
        jax.shard_map(draws, mesh=mesh_of(8), in_specs=(P(), P()), out_specs=P("data"))
    )
    seen = np.concatenate([mapped(make(0), jnp.int32(i)) for i in range(3)])
    assert len(np.unique(seen)) == seen.size == 48
    want = jax.random.fold_in(jax.random.fold_in(make(0), 2), 5)
    np.testing.assert_array_equal(seen[2 * 8 + 5], jax.random.bits(want, (2,)))


def test_what_is_not_one_key_is_refused():
    batch_of_keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(TypeError, match=r"array of keys of shape \(4,\)"):
        step_key(batch_of_keys, 0)
    with pytest.raises(TypeError, match=r"uint32\[4,2\]"):
        stream(jax.random.split(jax.random.PRNGKey(0), 4), "noise")
    with pytest.raises(TypeError, match=r"jax.random.key\(seed\)"):
        step_key(NOTHING[0], 0)
    with pytest.raises(TypeError, match="not a random key"):
        device_key(NOTHING[1])


def test_bad_steps_and_names_are_refused():
    key = jax.random.key(0)
    for step in (-1, 2**31):
        with pytest.raises(ValueError, match=f"step is {step}"):
            step_key(key, step)
    with pytest.raises(TypeError):
        step_key(key, NOTHING[2])
    with pytest.raises(TypeError, match="not one integer"):
        step_key(key, jnp.float32(1))
    with pytest.raises(ValueError, match="empty"):
        stream(key, "")
    with pytest.raises(TypeError, match="not 0"):
        stream(key, NOTHING[0])


def test_host_generators_differ_by_process_worker_and_epoch_and_repeat():
    def first_draws():
        places = itertools.product((0, 1), (0, 1), (0, 1, 2), (0, 1))
        return [
            host_rng(seed, process=process, worker=worker, epoch=epoch).random()
            for process, worker, epoch, seed in places
        ]

    draws = first_draws()
    assert len(set(draws)) == 24
    assert draws == first_draws()


def test_host_rng_asks_for_its_process():
    assert host_rng(0).random() == host_rng(0, process=0).random()
    with pytest.raises(ValueError, match="worker is -1"):
        host_rng(0, worker=-1)
