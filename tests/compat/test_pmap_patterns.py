"""How trainings of the pmap era use it, each written anew and held to one device.

A linear model under a squared loss, on 8 devices: the averaged gradient of the shards
is the gradient of the whole batch.
"""

import queue
import threading
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from same import assert_same

from lockstep import compat
from lockstep.compat import pmap

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 32, 3)).astype(np.float32)  # 5 steps of 32 rows
Y = RNG.normal(size=(5, 32, 2)).astype(np.float32)
START = {"w": RNG.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
STEPS = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def loss_of(params, batch):
    out = batch["x"] @ params["w"] + params["b"]
    return jnp.mean((out - batch["y"]) ** 2)


def descend(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def on_one_device(steps=STEPS):
    params, losses = START, []
    for batch in steps:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        params = descend(params, grads)
        losses.append(loss)
    return params, np.array(losses)


WANT, WANT_LOSSES = on_one_device()


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = lax.pmean(grads, "batch")
    return descend(params, grads), lax.pmean(loss, "batch")


def assert_trained(params):
    """All replicas are equal to the last bit, and to one device's result."""
    for leaf in jax.tree.leaves(params):
        assert not np.ptp(leaf, axis=0).any(), "the replicas drifted apart"
    assert_same(jax.device_get(compat.unreplicate(params)), jax.device_get(WANT))


def test_numpy_parameters_and_a_sum_of_gradients():
    """(a)"""

    @partial(pmap, axis_name="i")
    def step(params, x, y):
        grads = jax.grad(lambda p: loss_of(p, {"x": x, "y": y}) / 8)(params)
        return descend(params, lax.psum(grads, "i"))

    params = jax.tree.map(lambda p: np.broadcast_to(p, (8, *p.shape)), START)
    for x, y in zip(X, Y, strict=True):
        params = step(params, x.reshape(8, 4, 3), y.reshape(8, 4, 2))
    assert_trained(params)


def test_replicate_prefetch_statistics_and_donation():
    """(b)"""

    def step(state, batch):
        params, mean = state
        params, loss = train_step(params, batch)
        return (params, 0.9 * mean + 0.1 * batch["x"].mean(0)), {"loss": loss}

    step = pmap(step, axis_name="batch", donate_argnums=0)
    average = pmap(lambda x: lax.pmean(x, "x"), "x")
    state = compat.replicate((START, np.zeros(3, np.float32)))
    metrics = []
    for batch in compat.prefetch_to_device(map(compat.shard, STEPS), 2):
        state, step_metrics = step(state, batch)
        metrics.append(step_metrics)
    params, mean = state
    assert np.ptp(mean, axis=0).any(), "statistics of shards differ until averaged"
    mean = compat.unreplicate(average(mean))
    want = np.zeros(3)
    for x in X:
        want = 0.9 * want + 0.1 * x.mean(0)
    np.testing.assert_allclose(mean, want, rtol=1e-5)
    losses = compat.get_metrics(metrics)["loss"]
    np.testing.assert_allclose(losses, WANT_LOSSES, rtol=1e-5)
    assert_trained(params)


def test_lists_of_trees_put_by_a_thread():
    """(c)"""
    devices, ready = jax.local_devices(), queue.Queue(maxsize=2)

    def feed():
        for batch in STEPS:
            split = compat.shard(batch)
            rows = [jax.tree.map(lambda x, i=i: x[i], split) for i in range(8)]
            ready.put(compat.device_put_sharded(rows, devices))
        ready.put(None)

    thread = threading.Thread(target=feed)
    thread.start()
    params = compat.device_put_replicated(START, devices)
    step = pmap(train_step, "batch")
    while (batch := ready.get()) is not None:
        params, _ = step(params, batch)
    thread.join()
    assert_trained(params)


class State(NamedTuple):
    step: Any
    params: Any
    rate: Any


def test_python_numbers_in_a_bfloat16_state():
    """(d)"""

    def step(state, batch):
        grads = lax.pmean(jax.grad(loss_of)(state.params, batch), "batch")
        params = descend(state.params, grads, state.rate)
        return State(state.step + 1, params, state.rate * 0.5)

    to16 = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.bfloat16))
    state = compat.replicate(State(0, to16(START), 0.1))
    first = jax.tree.map(lambda x: (x.dtype, x.weak_type), state)
    mapped = pmap(step, "batch", donate_argnums=0)
    for batch in STEPS:
        state = mapped(state, to16(compat.shard(batch)))
    assert jax.tree.map(lambda x: (x.dtype, x.weak_type), state) == first
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.step.tolist() == [5] * 8


def test_a_call_by_keyword_alone():
    """(e)"""
    step = pmap(lambda *, params, batch: train_step(params, batch), "batch")
    params = compat.replicate(START)
    for batch in STEPS:
        params, _ = step(params=params, batch=compat.shard(batch))
    assert_trained(params)


def test_a_learner_on_some_devices_and_an_actor_on_another():
    """(f)"""
    learners, actor = jax.local_devices()[1:5], jax.local_devices()[0]
    step = pmap(train_step, "batch", devices=learners)
    params = compat.device_put_replicated(START, learners)
    acted, latest = [], queue.Queue()

    def act():
        while (newest := latest.get()) is not None:
            newest = jax.device_put(newest, actor)
            acted.append(jax.jit(loss_of)(newest, jax.device_put(STEPS[0], actor)))

    thread = threading.Thread(target=act)
    thread.start()
    for batch in STEPS:
        rows = jax.tree.map(lambda x: list(x.reshape(4, 8, -1)), batch)
        shards = [{"x": x, "y": y} for x, y in zip(rows["x"], rows["y"], strict=True)]
        params, _ = step(params, compat.device_put_sharded(shards, learners))
        latest.put(compat.unreplicate(params))
    latest.put(None)
    thread.join()
    assert {d for leaf in acted for d in leaf.devices()} == {actor}
    assert [s.device for s in params["w"].addressable_shards] == learners
    np.testing.assert_allclose(acted[-1], loss_of(WANT, STEPS[0]), rtol=1e-5)
    assert_trained(params)


def test_static_module_and_optimizer_with_a_sharded_update():
    """(g): every device updates its slice of the parameters and gathers the others."""

    @partial(pmap, axis_name="batch", static_broadcasted_argnums=(0, 1))
    def step(model, optimizer, flat, opt_state, batch):
        grads = jax.grad(
            lambda flat: jnp.mean((model.apply(flat, batch["x"]) - batch["y"]) ** 2)
        )(flat)
        slices = lax.psum_scatter(grads.reshape(8, -1), "batch", tiled=False) / 8
        mine = flat.reshape(8, -1)[lax.axis_index("batch")]
        updates, opt_state = optimizer.update(slices, opt_state, mine)
        new = lax.all_gather(optax.apply_updates(mine, updates), "batch", tiled=True)
        return new, opt_state

    class Flat(nn.Module):
        def apply(self, flat, x):
            return x @ flat[:6].reshape(3, 2) + flat[6:]

    flat = np.concatenate([START["w"].ravel(), START["b"]])
    model, optimizer = Flat(), optax.sgd(0.1, momentum=0.9)
    flat = compat.replicate(flat)
    opt_state = pmap(optimizer.init)(np.zeros((8, 1), np.float32))
    reference, momentum = jax.device_get(compat.unreplicate(flat)), np.zeros(8)
    for batch in STEPS:
        flat, opt_state = step(model, optimizer, flat, opt_state, compat.shard(batch))
        grads = jax.grad(
            lambda f, b=batch: jnp.mean((Flat().apply(f, b["x"]) - b["y"]) ** 2)
        )(reference)
        momentum = 0.9 * momentum + grads
        reference = reference - 0.1 * momentum
    assert not np.ptp(flat, axis=0).any()
    np.testing.assert_allclose(compat.unreplicate(flat), reference, rtol=1e-5)
    assert jax.tree.leaves(opt_state)[0].shape == (8, 1), "a slice a device"


def test_a_scan_of_steps_with_a_donated_carry():
    """(h)"""

    def many(batches, params):
        return lax.scan(train_step, params, batches)

    many = pmap(many, "batch", donate_argnums=1)
    batches = {"x": X.reshape(5, 8, 4, 3), "y": Y.reshape(5, 8, 4, 2)}
    batches = jax.tree.map(lambda x: x.swapaxes(0, 1), batches)
    params = compat.replicate(jax.tree.map(jnp.asarray, START))
    trained, losses = many(batches, params)
    assert params["w"].is_deleted()
    np.testing.assert_allclose(losses[3], WANT_LOSSES, rtol=1e-5)
    assert_trained(trained)


def test_under_jit_and_from_one_device():
    """(i) and (j)"""
    step = pmap(train_step, "batch")
    params = jax.device_put(compat.shard({"w": np.tile(START["w"], (8, 1))}), None)
    params = {"w": params["w"].reshape(8, 3, 2), "b": np.zeros((8, 2), np.float32)}
    params = jax.device_put(params, jax.devices()[0])
    params, _ = step(params, jax.device_put(compat.shard(STEPS[0]), jax.devices()[0]))
    assert step.moves.leaves == 4
    jitted = jax.jit(lambda p, b: step(p, b)[0])
    for batch in STEPS[1:]:
        params = jitted(params, compat.shard(batch))
    assert_trained(params)


def test_a_snapshot_is_restored_and_goes_on():
    """(k)"""
    step = pmap(train_step, "batch", donate_argnums=0)
    params = compat.replicate(START)
    for batch in STEPS[:2]:
        params, _ = step(params, compat.shard(batch))
    snapshot = jax.device_get(compat.unreplicate(params))
    for batch in STEPS[:3]:
        params, _ = step(params, compat.shard(batch))
    params = compat.replicate(snapshot)
    for batch in STEPS[2:]:
        params, _ = step(params, compat.shard(batch))
    assert_trained(params)


def test_a_struct_of_python_floats_through_a_mean():
    """(l)"""

    class Metrics(NamedTuple):
        loss: Any
        scale: Any
        count: Any

    def step(x):
        metrics = Metrics(loss=x.sum(), scale=0.5, count=4)
        mean = lax.pmean(metrics, "batch")
        shape = jnp.zeros(lax.psum(1, "batch"))  # a plain number, usable as a shape
        return mean, lax.psum((True, None, 2), "batch"), shape

    mean, sums, shape = pmap(step, "batch")(np.arange(8.0).reshape(8, 1))
    assert jax.tree.map(lambda m: m[0].item(), mean) == Metrics(3.5, 0.5, 4.0)
    assert sums[0].tolist() == [8] * 8 and sums[1] is None
    assert sums[2].tolist() == [16] * 8 and shape.shape == (8, 8)


@pytest.mark.parametrize("helper", [compat.replicate, compat.device_put_replicated])
def test_the_caller_s_own_parameters_survive_donation(helper):
    own = jax.tree.map(jnp.asarray, START)
    args = () if helper is compat.replicate else (jax.local_devices(),)
    stacked = helper(own, *args)
    pmap(train_step, "batch", donate_argnums=0)(stacked, compat.shard(STEPS[0]))
    assert stacked["w"].is_deleted()
    np.testing.assert_array_equal(own["w"], START["w"])


def test_dynamic_loss_scale_of_flax():
    from flax.training.dynamic_scale import DynamicScale

    def step(scale, params, batch):
        grad_fn = scale.value_and_grad(loss_of, axis_name="batch")
        scale, finite, loss, grads = grad_fn(params, batch)
        return scale, descend(params, grads), finite, lax.pmean(loss, "batch")

    scale, params = compat.replicate((DynamicScale(growth_interval=2), START))
    mapped = pmap(step, "batch", donate_argnums=(0, 1))
    for i, batch in enumerate(STEPS):
        scale, params, finite, loss = mapped(scale, params, compat.shard(batch))
        assert bool(finite.all())
        np.testing.assert_allclose(loss[0], WANT_LOSSES[i], rtol=1e-5)
    assert scale.scale.tolist() == [65536.0 * 2] * 8
    assert_trained(params)
