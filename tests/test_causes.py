"""Each planted fault is found and named in the words of its fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from test_compare import (
    KEY,
    OPTIMIZER,
    dropout_loss,
    make_batch,
    make_params,
    make_state,
    make_step,
    masked_loss,
    plain_loss,
    pmean,
    psum,
    verdicts,
)

from lockstep.debug import compare
from lockstep.parallel import parallelize, per_device
from lockstep.step import make_train_step

SGD = optax.sgd(0.1)


def cause_of(step, state=None, batch=None, *rest, **options):
    """The one cause that `compare` names for a device-view step."""
    state = make_state() if state is None else state
    batch = make_batch() if batch is None else batch
    report = compare(step, state, batch, *rest, **{"axis_name": "data"} | options)
    assert not report.same
    assert f"outputs differ between {report.devices[0]} and" in str(report)
    (cause,) = report.causes
    return cause


def test_a_gradient_that_is_not_6_but_1_5():
    """Case C2: w = 1, x = 0..3, loss = mean(w x)."""

    def step(w, x):
        return w, psum(jax.grad(lambda w: (w * x).mean())(w))

    report = compare(step, 1.0, np.arange(4, dtype=np.float32), axis_name="data")
    assert "4.00 x = number of devices: summed, not averaged" in str(report)
    assert report.causes == (
        "metrics 4 x: summed, not averaged: lax.pmean where the step has lax.psum",
    )


def test_a_sum_under_adam_is_seen_from_the_moments():
    """The parameters do not show it: Adam divides by the size of the gradient."""
    report = compare(
        make_step(average=psum), make_state(), make_batch(), axis_name="data"
    )
    notes = {row.path: row.note for row in report.rows}
    assert notes["state[1][0].mu['w']"].startswith("4.00 x = number of devices")
    assert notes["state[1][0].nu['w']"] == "16.00 x = number of devices, squared"
    (cause,) = report.causes
    assert cause.startswith("gradient 4.00 x: summed, not averaged")
    assert "lax.pmean(grads) where the step has lax.psum(grads)" in cause


def test_a_sum_is_seen_from_moments_that_were_not_zero():
    state, step = make_state(), jax.jit(make_step())
    for _ in range(3):
        state, _ = step(state, make_batch())
    cause = cause_of(make_step(average=psum), state)
    assert cause.startswith("gradient 4.00 x: summed, not averaged")


def test_a_sum_under_sgd_is_seen_from_the_update():
    step = make_step(average=psum, optimizer=SGD)
    cause = cause_of(step, make_state(SGD), devices=(2, 4))
    assert cause.startswith("gradient 2.00 x: summed, not averaged (state[0]['b'] 2 x")


def test_a_sum_is_seen_through_masks_that_differ():
    """Of 16 rows with a dropout of 0.1, drawn anew for another device count."""

    def loss(params, batch, key):
        keep = jax.random.bernoulli(key, 0.9, batch["x"].shape)
        return plain_loss(params, batch | {"x": batch["x"] * keep / 0.9})

    healthy, summed = make_step(loss, pmean), make_step(loss, psum)
    args = make_state(), make_batch(), KEY
    assert compare(healthy, *args, axis_name="data").same
    assert cause_of(summed, *args).startswith("gradient 4.00 x: summed, not averaged")


def test_an_average_of_an_average():
    step = make_step(average=lambda g: _over_devices(pmean(g)))
    assert cause_of(step).startswith("gradient 0.25 x: averaged twice")


def _over_devices(grads):
    return jax.tree.map(lambda g: g / lax.axis_size("data"), grads)


def test_a_metric_that_is_a_sum_of_local_rows():
    def step(w, x):
        return w + pmean(x.mean()), {"total": x.sum()}

    cause = cause_of(step, 0.0, np.ones(8, np.float32))
    assert cause.startswith("metrics['total'] 0.25 x: a sum over the rows of one")


def test_a_mean_of_means_under_a_mask():
    cause = cause_of(make_step(masked_loss, pmean))
    assert cause.startswith("mean of means: the shards have 4, 3, 2 and 1 valid rows")
    assert "lax.psum(total) / lax.psum(count)" in cause


def test_a_mean_of_means_of_tokens_without_a_mask():
    """The mask is made inside the step, from the padding token 0."""
    rng = np.random.default_rng(0)
    lengths = np.array([6, 6, 5, 5, 4, 3, 2, 2])
    tokens = rng.integers(1, 9, (8, 6))
    tokens = np.where(np.arange(6) < lengths[:, None], tokens, 0)

    def step(w, batch):
        def loss(w):
            valid = batch["tokens"] > 0
            return (w[batch["tokens"]] ** 2 * valid).sum() / valid.sum()

        return w - 0.1 * pmean(jax.grad(loss)(w)), None

    w = rng.normal(size=9).astype(np.float32)
    cause = cause_of(step, w, {"tokens": tokens})
    assert "the shards have 12, 10, 7 and 4 valid entries" in cause


def test_a_mean_of_means_of_padded_rows():
    step = per_device(make_step(masked_loss, pmean), remainder="pad")
    batch = {k: v for k, v in make_batch(10).items() if k != "mask"}
    cause = cause_of(step, batch=batch, axis_name=None)
    assert "the shards have 3, 3, 3 and 1 valid rows" in cause


def test_the_greatest_gradient_of_all_devices():
    def greatest(grads):
        return lax.pmax(grads, "data")

    cause = cause_of(make_step(average=greatest, optimizer=SGD))
    assert cause.startswith("not averaged: lax.pmax at tests/test_causes.py:")
    assert "grads = lax.pmean(grads, 'data')" in cause


def test_a_mean_of_means_in_a_train_step():
    step = make_train_step(masked_loss, OPTIMIZER, axis_name="data", mask=None)
    cause = cause_of(step, step.init(make_params()), axis_name=None)
    assert cause.startswith("mean of means: the shards have 4, 3, 2 and 1 valid rows")
    assert "return Mean.of(values, mask) from the loss" in cause


def test_a_mean_of_means_of_microbatches():
    """Case C5, in the device view: two microbatches on each device."""

    def step(params, batch):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(masked_loss)(params, part)), 0

        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads = pmean(lax.scan(add, zeros, parts)[0])
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), None

    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1], np.float32)
    cause = cause_of(step, make_params(), make_batch() | {"mask": mask})
    assert cause.startswith("mean of means: the shards have 4, 3, 3 and 2 valid rows")
    assert "each device (or microbatch) divides by its own" in cause


def normalised_step(average_statistics, axis=None):
    """A step with BatchNorm, whose running statistics are in the state."""

    def loss(params, batch):
        hidden = batch["x"] @ params["w"]
        mean, square = hidden.mean(0), (hidden**2).mean(0)
        if axis:
            mean, square = lax.pmean((mean, square), axis)
        var = square - mean**2
        hidden = (hidden - mean) / jnp.sqrt(var + 1e-5)
        value = ((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2).mean()
        return value, {"mean": mean, "var": var}

    def step(state, batch):
        params, running = state
        grads, seen = jax.grad(loss, has_aux=True)(params, batch)
        grads, seen = pmean(grads), average_statistics(seen)
        running = jax.tree.map(lambda r, s: 0.9 * r + 0.1 * s, running, seen)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), running), None

    return step, (make_params(), {"mean": jnp.zeros(4), "var": jnp.ones(4)})


def test_batch_norm_over_the_rows_of_one_device():
    step, state = normalised_step(pmean)
    cause = cause_of(step, state)
    assert cause.startswith("BatchNorm scope: each device normalises")
    assert "state[1]['var'] is" in cause and "axis_name='data'" in cause


def test_batch_norm_over_all_rows_is_no_fault():
    step, state = normalised_step(lambda x: x, axis="data")
    assert compare(step, state, make_batch(), axis_name="data").same


def test_running_statistics_of_one_device():
    """Case E1: nobody averages them."""
    step, state = normalised_step(lambda x: x)
    report = compare(step, state, make_batch(), axis_name="data")
    assert [r.path for r in report.rows if r.note == "copies differ"] == [
        "state[1]['mean']",
        "state[1]['var']",
    ]
    assert report.causes[0].startswith(
        "not averaged: state[1]['mean'], state[1]['var'] of the new state come from "
        "each device's own rows"
    )


def test_the_same_mask_on_every_device():
    """Case D1: a key that every device has."""

    def loss(params, batch):
        return dropout_loss(params, batch, KEY)

    cause = cause_of(make_step(loss, pmean))
    assert cause.startswith("same mask on every device: 1 of the step's random draws")
    assert "lockstep.device_key(key, 'data')" in cause


def clip_by_norm(grads, limit=0.1):
    factor = jnp.minimum(1, limit / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * factor, grads)


def clip_by_optax(grads):
    clip = optax.clip_by_global_norm(0.1)
    return clip.update(grads, clip.init(grads))[0]


def clip_by_value(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)


@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_optax, clip_by_value])
def test_clipping_before_the_average(clip):
    step = make_step(average=lambda g: pmean(clip(g)), optimizer=SGD)
    cause = cause_of(step, make_state(SGD))
    assert cause.startswith("clipped before averaging")
    assert "First grads = lax.pmean(grads, 'data'), then clip" in cause


def test_clipping_after_the_average_is_no_fault():
    step = make_step(average=lambda g: clip_by_norm(pmean(g)), optimizer=SGD)
    assert compare(step, make_state(SGD), make_batch(), axis_name="data").same


def test_an_average_inside_the_loss_alone():
    """Case C3: right losses and wrong gradients."""

    def loss(params, batch):
        return pmean(plain_loss(params, batch))

    report = compare(make_step(loss), make_state(), make_batch(), axis_name="data")
    assert verdicts(report)["metrics['loss']"] in ("equal", "rounding")
    (cause,) = report.causes
    assert cause.startswith("gradient not averaged: state[0]['b']")
    assert "lax.pmean inside the loss averages the loss, not its gradient" in cause
    assert "grads = lax.pmean(grads, 'data')" in cause


def test_an_average_inside_the_loss_and_after_it_is_no_fault():
    def loss(params, batch):
        return pmean(plain_loss(params, batch))

    step = make_step(loss, pmean)
    assert compare(step, make_state(), make_batch(), axis_name="data").same


def test_a_forgotten_average():
    def step(state, batch):
        state, metrics = make_step()(state, batch)
        return state, pmean(metrics)

    cause = cause_of(step)
    assert cause.startswith("gradient not averaged: state[0]['b']")
    assert "inside the loss" not in cause


def test_a_cause_that_cannot_be_seen():
    """In-batch negatives: the rows of one device meet each other alone."""

    def step(w, x):
        def loss(w):
            return -jnp.trace(jax.nn.log_softmax((x @ w) @ (x**2 @ w).T)) / len(x)

        return w - 0.1 * pmean(jax.grad(loss)(w)), None

    state, x = np.ones((3, 2), np.float32), make_batch()["x"]
    report = compare(step, state, x, axis_name="data")
    assert not report.same and report.causes == ()
    assert report.advice.startswith("the cause is not visible in the outputs")
    assert "rows that meet (in-batch negatives)" in report.advice
    assert "Show the loss: return it and its gradient" in report.advice
    assert compare(parallelize(_without_average(step)), state, x).same


def _without_average(step):
    """The same step for the global view, where one device is all."""

    def alone(w, x):
        mapped = jax.vmap(lambda x: step(w, x), axis_name="data")
        return jax.tree.map(lambda y: y[0], mapped(x[None]))

    return alone


def test_values_that_are_not_finite_on_n_devices():
    """A shard without a valid row divides by zero."""
    batch = make_batch() | {"mask": np.repeat([1, 1, 1, 0], 4).astype(np.float32)}
    step = make_step(masked_loss, pmean)
    report = compare(step, make_state(), batch, axis_name="data")
    assert {row.note for row in report.rows if row.verdict == "wrong"} == {"not finite"}
    assert "the shards have 4, 4, 4 and 0 valid rows" in report.causes[0]
