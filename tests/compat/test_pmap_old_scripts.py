"""Kinds of pmap-era scripts, as they were written, against `vmap` or by hand.

The steps are as old code has them; `vmap` over the same axis name says what they mean.
"""

import functools
import threading
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, struct
from flax.core import FrozenDict, freeze
from flax.training import common_utils
from jax import lax
from same import assert_same

from lockstep import compat

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def _era():
    with compat.installed():
        yield


class Learner(NamedTuple):
    params: Any
    optimizer: Any
    steps: int
    key: Any


def test_a_learner_that_scans_over_its_batches():
    """As dm-acme: a list of equal states, a scan of steps, the first device's row."""
    tx = optax.adam(1e-2)

    def loss_of(w, x):
        return jnp.mean((x @ w - x.sum(-1)) ** 2)

    def sgd_step(state, x):
        key, _ = jax.random.split(state.key)
        loss, grads = jax.value_and_grad(loss_of)(state.params, x)
        grads = lax.pmean(grads, "data")
        updates, optimizer = tx.update(grads, state.optimizer)
        params = optax.apply_updates(state.params, updates)
        return Learner(params, optimizer, state.steps + 1, key), loss

    def steps(state, xs):
        return lax.scan(sgd_step, state, xs.reshape(2, -1, 3))

    w = jnp.zeros(3)
    start = Learner(w, tx.init(w), 0, jax.random.PRNGKey(1))
    devices = jax.local_devices()
    state = jax.device_put_sharded([start] * 8, devices)
    want = jax.tree_map(lambda x: np.broadcast_to(x, (8, *np.shape(x))), start)
    step = jax.pmap(steps, "data", devices=devices)
    for _ in range(3):
        state, losses = step(state, X)
        want, _ = jax.vmap(steps, axis_name="data")(want, X)
    assert losses.shape == (8, 2)
    assert_same(jax.device_get(state), jax.device_get(want), 1e-5)
    first = jax.device_get(jax.tree_map(lambda x: x[0], state))
    assert isinstance(first, Learner) and first.steps == 6
    assert state.steps.dtype == jnp.int32


@chex.dataclass
class Weights:
    w: Any
    count: int


@struct.dataclass
class Optimizer:
    weights: Weights
    rates: dict
    name: str = struct.field(pytree_node=False, default="sgd")


def test_dataclasses_in_dataclasses_keep_their_types():
    start = {
        "optimizer": Optimizer(
            Weights(w=jnp.ones(3), count=0), {"lr": 0.5, "on": True}
        ),
        "extra": freeze({"a": {"b": np.arange(2.0)}}),
        "nothing": None,
    }

    @jax.pmap
    def step(state, x):
        optimizer = state["optimizer"]
        old = optimizer.weights
        new = old.replace(w=old.w + x * optimizer.rates["lr"], count=old.count + 1)
        return state | {"optimizer": optimizer.replace(weights=new)}

    state = jax_utils.replicate(start)
    for _ in range(3):
        state = step(state, np.arange(8.0))
    optimizer = state["optimizer"]
    assert isinstance(state["extra"], FrozenDict) and state["nothing"] is None
    assert isinstance(optimizer.weights, Weights) and optimizer.name == "sgd"
    assert optimizer.weights.count.tolist() == [3] * 8
    np.testing.assert_array_equal(optimizer.weights.w[:, 0], 1 + 1.5 * np.arange(8))


def test_static_numbers_donation_and_trees_of_axes_at_once():
    axes = (0, None, {"x": 0, "scale": None, "deep": {"m": 1}}, None)

    @functools.partial(
        jax.pmap,
        axis_name="b",
        static_broadcasted_argnums=(1, 3),
        donate_argnums=(0,),
        in_axes=axes,
    )
    def step(w, times, batch, mode):
        for _ in range(times):
            w = w + batch["x"] * batch["scale"] + batch["deep"]["m"]
        return lax.psum(w, "b") if mode == "sum" else w

    x, m = X[:, 0, :2], X[:2, 0, :1].repeat(8, 1)
    batch = {"x": x, "scale": 2.0, "deep": {"m": m}}
    w = jnp.ones((8, 2))
    want = 1 + 3 * (2 * x + m.T)
    np.testing.assert_allclose(step(w, 3, batch, "each"), want, rtol=1e-6)
    total = step(w, 3, batch, "sum")
    np.testing.assert_allclose(total, np.tile(want.sum(0), (8, 1)), rtol=1e-5)


def test_an_evaluation_of_padded_rows_gathers_predictions_and_sums_metrics():
    x, labels = X.reshape(48, 3)[:43], RNG.integers(0, 5, 43)
    params = RNG.normal(size=(3, 5)).astype(np.float32)

    def eval_step(params, batch):
        logits = batch["x"] @ params
        right = (logits.argmax(-1) == batch["y"]) * batch["mask"]
        losses = (common_utils.onehot(batch["y"], 5) * jax.nn.log_softmax(logits)).sum(
            -1
        )
        sums = {
            "loss": -(losses * batch["mask"]).sum(),
            "accuracy": right.sum(),
            "count": batch["mask"].sum(),
        }
        gathered = lax.all_gather(logits.argmax(-1), "batch")
        return lax.psum(sums, "batch"), gathered

    def padded(rows):
        return np.concatenate([rows, np.repeat(rows[-1:], 5, 0)])

    mask = (np.arange(48) < 43).astype(np.float32)
    batch = common_utils.shard({"x": padded(x), "y": padded(labels), "mask": mask})
    p_eval = jax.pmap(eval_step, axis_name="batch")
    sums, gathered = p_eval(jax_utils.replicate(params), batch)
    sums = jax.device_get(jax.tree_map(lambda x: x[0], sums))
    logits = x @ params
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(43), labels]
    np.testing.assert_allclose(sums["loss"] / sums["count"], losses.mean(), rtol=1e-5)
    assert sums["accuracy"] == (logits.argmax(-1) == labels).sum()
    predictions = np.array(gathered[0]).reshape(-1)[:43]
    np.testing.assert_array_equal(predictions, logits.argmax(-1))


def test_collectives_inside_loops_and_branches():
    def many(w, xs):
        def body(carry, x):
            w, momentum = carry
            loss = functools.partial(lambda x, w: jnp.mean((x * w - 1) ** 2), x)
            momentum = 0.9 * momentum + lax.pmean(jax.grad(loss)(w), axis_name="d")
            return (w - 0.1 * momentum, momentum), lax.psum(w, "d")

        (w, _), history = lax.scan(jax.checkpoint(body), (w, jnp.zeros_like(w)), xs)
        grown = lax.fori_loop(0, 3, lambda i, a: a + lax.pmean(a, "d"), w)
        count = lax.while_loop(
            lambda a: a < 100, lambda a: a + lax.psum(1, "d"), jnp.zeros(())
        )
        branch = lax.cond(count > 50, lambda a: lax.pmax(a, "d"), lambda a: a, w)
        return history, grown, count, branch

    w = jnp.linspace(0, 1, 8)
    got, want = jax.pmap(many, "d")(w, X), jax.vmap(many, axis_name="d")(w, X)
    assert_same(jax.device_get(got), jax.device_get(want), 1e-5)


def test_pmap_over_vmap_and_vmap_over_pmap():
    @jax.pmap
    @functools.partial(jax.vmap, axis_name="inner")
    def centered(x):
        return x - lax.pmean(x, "inner")

    def total(x):
        return lax.psum(x, ("outer", "inner"))

    both = jax.pmap(jax.vmap(total, axis_name="inner"), axis_name="outer")
    across = jax.vmap(jax.pmap(lambda x: lax.psum(x, "p"), "p"), in_axes=1, out_axes=1)
    mean, whole, column = X.mean(1, keepdims=True), X.sum((0, 1)), X.sum(0)
    np.testing.assert_allclose(centered(X), X - mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(both(X), np.broadcast_to(whole, X.shape), rtol=1e-4)
    np.testing.assert_allclose(across(X), np.broadcast_to(column, X.shape), rtol=1e-4)


def test_callbacks_to_the_host_come_once_from_each_device():
    seen, lock = [], threading.Lock()

    def note(index, value):
        with lock:
            seen.append((int(index), float(value)))

    @jax.pmap
    def step(index, x):
        jax.debug.callback(note, index, x.sum())
        return jax.pure_callback(lambda v: 2 * np.asarray(v), x, x)

    x = X[:, 0]
    np.testing.assert_allclose(step(np.arange(8), x), 2 * x)
    jax.effects_barrier()
    assert [index for index, _ in sorted(seen)] == list(range(8))
    np.testing.assert_allclose([v for _, v in sorted(seen)], x.sum(-1), rtol=1e-6)


def test_an_adversary_with_a_penalty_on_its_slope():
    """Gradients by inputs inside a loss, and `tree_multimap` for the update."""

    def critic(p, x):
        return jnp.tanh(x @ p["w"]).sum(-1)

    def step(p, real, fake):
        def loss(p):
            slope = jax.grad(lambda x: critic(p, x).sum())(real)
            penalty = 5 * jnp.mean((slope**2).sum(-1))
            scores = jax.nn.softplus(-critic(p, real)) + jax.nn.softplus(
                critic(p, fake)
            )
            return jnp.mean(scores) + penalty

        grads = lax.pmean(jax.grad(loss)(p), "batch")
        return jax.tree_multimap(lambda a, b: a - 0.1 * b, p, grads)

    w = {"w": np.tile(RNG.normal(size=(1, 3, 2)), (8, 1, 1)).astype(np.float32)}
    got = jax.pmap(step, axis_name="batch")(w, X, X[::-1])
    want = jax.vmap(step, axis_name="batch")(w, X, X[::-1])
    assert_same(jax.device_get(got), jax.device_get(want), 1e-5)


def closed_over(where):
    """An array that does not lie on the devices of the map, and its value."""
    devices = jax.devices()
    if where == "one device":
        return jax.device_put(np.arange(3.0), devices[5]), np.arange(3.0)
    if where == "drawn on one":
        key = jax.device_put(jax.random.key(0), devices[2])
        return jax.random.normal(key, (3,)), jax.random.normal(jax.random.key(0), (3,))
    two = jax.pmap(lambda v: v + 1, devices=devices[:2])(X[:2, 0])
    return two.sum(0), (X[:2, 0] + 1).sum(0)


@pytest.mark.parametrize("where", ["one device", "drawn on one", "two devices"])
def test_arrays_that_are_closed_over_may_lie_elsewhere(where):
    array, value = closed_over(where)
    out = jax.pmap(lambda x: x + array)(X[:, 0])
    np.testing.assert_allclose(out, X[:, 0] + value, rtol=1e-4)
