"""Published faults of data-parallel training, each with the right value.

Letter and number are those of the project's list of cases: B batches, C loss and
gradient scale, D random numbers, E state, L evaluation. Cases that a test of a module
bears in its name or docstring are not repeated:

| case | where |
|---|---|
| B5 "batch size" has three meanings | test_batch_plan.py |
| C1 mean of means under a mask | test_step.py, test_causes.py |
| C2 gradients N times too large | test_step.py, test_per_device.py, test_causes.py |
| C3 average inside the loss | test_step.py, test_causes.py |
| C5 microbatches of unequal weight | test_step.py, test_causes.py |
| C8 gradient norm grows with the devices | test_step.py |
| D4 the same augmentation in all workers | test_rng.py |
| E1 BatchNorm's statistics differ | test_model_state.py, test_causes.py |
| E6 bug or rounding? | test_compare.py |
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from same import assert_same

import lockstep as ls

WRAPPERS = {"global": ls.parallelize, "device": ls.per_device}
both_views = pytest.mark.parametrize("view", WRAPPERS)
ONES = np.ones(8, np.float32)


def squares(params, batch):
    return (batch @ params["w"]) ** 2


def make(loss=squares, view="global", key=None):
    """A train step and its first state."""
    axis_name = "data" if view == "device" else None
    step = ls.make_train_step(loss, optax.sgd(0.1), axis_name=axis_name)
    return step, step.init({"w": jnp.ones(2)}, key=key)


def batch_of(rows):
    return np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) / 10


@both_views
@pytest.mark.parametrize("rows", [10, 2])
def test_B1_rows_that_do_not_divide_follow_one_explicit_policy(mesh_of, view, rows):
    step, state = make(view=view)
    wrap, mesh, batch = WRAPPERS[view], mesh_of(4), batch_of(rows)
    sizes = {10: "8 or 12", 2: "4"}[rows]
    with pytest.raises(ValueError, match=f"has {rows} rows; the 4 .*, or {sizes} rows"):
        wrap(step, mesh)(state, batch)
    single, state_of_one = make()
    want, metrics = jax.jit(single)(state_of_one, batch)
    got, padded = wrap(step, mesh, remainder="pad")(state, batch)
    assert_same(got.params, want.params)
    assert_same(padded["loss"], metrics["loss"])
    dropping = wrap(step, mesh, remainder="drop")
    kept = dropping.place_batch(batch)
    assert dropping.dropped_rows == 2
    assert kept is None if rows == 2 else kept.shape[0] == 8


@both_views
def test_B2_a_short_batch_does_not_compile_again(mesh_of, view):
    (single, want), (step, got) = make(), make(view=view)
    run = WRAPPERS[view](step, mesh_of(4), remainder="pad")
    for rows in (8, 8, 5, 8):
        got, metrics = run(got, batch_of(rows))
        want, expected = jax.jit(single)(want, batch_of(rows))
        assert_same(metrics["loss"], expected["loss"])
    assert_same(got.params, want.params)
    assert run.compiles.count == 1


def drop_half(state, batch, key):
    return state, jax.random.bernoulli(key, 0.5, batch.shape)


def test_D1_the_mask_is_that_of_one_device_and_new_in_each_step(mesh_of):
    batch, masks = np.ones((8, 6), np.float32), []
    for key in (ls.step_key(jax.random.key(0), i) for i in range(2)):
        masks.append(jax.random.bernoulli(key, 0.5, batch.shape))
        _, got = ls.parallelize(drop_half, mesh_of(4))(0.0, batch, key)
        np.testing.assert_array_equal(got, masks[-1])
    assert not np.array_equal(*masks)


def test_D1_in_the_device_view_each_device_has_a_mask_of_its_own(mesh_of):
    batch, key = np.ones((8, 6), np.float32), jax.random.key(0)
    _, blocks = ls.per_device(drop_half, mesh_of(4))(0.0, batch, key)
    assert len({np.asarray(block).tobytes() for block in blocks}) == 4


@both_views
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_D2_one_key_needs_no_splitting(mesh_of, view, make_key):
    def draw(state, batch, key):
        return state, jax.random.uniform(key, batch.shape)

    _, draws = WRAPPERS[view](draw, mesh_of(4))(0.0, ONES, make_key(0))
    assert len(np.unique(draws)) == 8


def test_D3_a_run_goes_on_with_the_same_masks_on_other_devices(mesh_of):
    def noisy(params, batch, key):
        return squares(params, batch) * jax.random.uniform(key, (len(batch),))

    step, start = make(noisy, key=jax.random.key(0))
    ends = []
    for meshes in ((4, 4, 4), (4, 2, 1)):
        state = start
        for devices in meshes:
            run = ls.parallelize(step, mesh_of(devices))
            state = ls.to_host(run(state, batch_of(8))[0])
        ends.append(state)
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_D5_typed_keys_survive_the_way_to_the_devices_and_back(mesh_of, impl):
    key = jax.random.key(3, impl=impl)
    placed = ls.replicate({"key": key}, mesh_of(4))
    ls.debug.check_replicas(placed)
    back = ls.to_host(placed)["key"]
    assert back.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(key))


def test_E3_copies_that_differ_are_found_whatever_the_array_claims(mesh_of):
    mesh = mesh_of(4)
    mean = jax.shard_map(
        lambda x: x[0], mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )(jnp.arange(4.0))
    assert mean.is_fully_replicated and float(mean) == 0.0
    with pytest.raises(
        ls.debug.ReplicaMismatch,
        match=r"\['mean'\]: devices 1, 2, 3 differ from 0, .*index 0, .*difference 3",
    ):
        ls.debug.check_replicas({"mean": mean})
    with pytest.raises(ls.debug.ReplicaMismatch):  # lockstep returns no such state

        def forgets(w, x):
            return w + x.mean(), jax.lax.pmean(x.mean(), "data")

        ls.per_device(forgets, mesh)(0.0, np.arange(4, dtype=np.float32))


@both_views
def test_L1_the_last_rows_are_evaluated_and_compile_nothing(mesh_of, view):
    right = np.array([1] * 9 + [0], np.float32)
    batches = [{"right": right[i : i + 4]} for i in range(0, 10, 4)]
    step = WRAPPERS[view](
        lambda state, batch: {"accuracy": batch["right"]}, mesh_of(4), remainder="pad"
    )
    assert ls.evaluate(step, 0.0, batches) == {"accuracy": pytest.approx(0.9)}
    assert step.compiles.count == 1


def test_L2_a_metric_is_no_mean_of_means(mesh_of):
    def step(state, batch):
        hits = jnp.sum(batch["right"] * batch["true"])
        f1 = ls.Mean(2 * hits, jnp.sum(batch["right"]) + jnp.sum(batch["true"]))
        return {"accuracy": batch["right"].mean(), "f1": f1}

    right = np.array([1] * 8 + [0] * 2, np.float32)
    true = np.array([1, 0] * 5, np.float32)
    batches = [
        {"right": right[i : i + 4], "true": true[i : i + 4]} for i in range(0, 10, 4)
    ]
    got = ls.evaluate(step, 0.0, batches, mesh=mesh_of(4))
    assert got == {"accuracy": 0.8, "f1": pytest.approx(2 * 4 / (8 + 5))}
