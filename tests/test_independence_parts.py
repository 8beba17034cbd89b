"""Losses whose rows meet in a fixed shard or in a microbatch: refused as on devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls
from lockstep.parallel.independence.trial import Trial

_RNG = np.random.default_rng(0)
BATCH = {
    "x": _RNG.normal(size=(32, 3)).astype(np.float32),
    "y": _RNG.normal(size=(32, 4)).astype(np.float32),
    "count": _RNG.integers(0, 5, 32).astype(np.float32),
}
START = {"w": _RNG.normal(size=(3, 4)).astype(np.float32)}
SHARDS = {"axis_name": "data", "fixed_shards": 8}
WAYS = {
    "shards": (SHARDS, "shard"),
    "shards of microbatches": (SHARDS | {"accumulate": 2}, "shard"),
    "one shard": (SHARDS | {"fixed_shards": 1, "accumulate": 2}, "microbatch"),
    "microbatches": ({"accumulate": 2}, "microbatch"),
    "sharded optimizer": (
        {"accumulate": 2, "optimizer_sharding": "data"},
        "microbatch",
    ),
}


def errors(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def contrastive(params, batch):
    a = batch["x"] @ params["w"]
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ a.T)))


def by_tokens(params, batch):
    weighed = errors(params, batch) * batch["count"][:, None]
    return weighed.sum() / batch["count"].sum()


MEETING = {
    "sum": (lambda p, b: errors(p, b).sum(), "a sum over its rows"),
    "contrastive": (contrastive, "rows meet in `dot_general`"),
    "max": (lambda p, b: errors(p, b).max(), "rows meet in `reduce_max`"),
    "rmse": (lambda p, b: jnp.sqrt(errors(p, b).mean()), "it bends a mean"),
    "tokens": (by_tokens, r"(shards|microbatches) whose divisors differ"),
    "logsumexp": (lambda p, b: jax.nn.logsumexp(errors(p, b)), "`reduce_max`"),
}
INDEPENDENT = {
    "rows": lambda p, b: errors(p, b).mean(1),
    "mean": lambda p, b: errors(p, b).mean(),
    "Mean": lambda p, b: ls.Mean.of(errors(p, b), b["count"][:, None] * jnp.ones(4)),
}


def first_step(loss, mesh, batch=BATCH, remainder="error", **options):
    step = ls.make_train_step(loss, optax.sgd(0.1), **options)
    wrap = ls.per_device if "axis_name" in options else ls.parallelize
    run = wrap(step, mesh, remainder=remainder)
    return run, run(step.init(START), batch)


def refused(loss, mesh, way, **options):
    """The message; with one device, for it is not the devices that split here."""
    with pytest.raises(ValueError, match="the loss is") as caught:
        first_step(loss, mesh, **WAYS[way][0], **options)
    return str(caught.value)


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["shards", "microbatches"])
@pytest.mark.parametrize("loss, why", MEETING.values(), ids=MEETING)
def test_rows_that_meet_are_refused(loss, why, way, devices, mesh_of):
    text, part = refused(loss, mesh_of(devices), way), WAYS[way][1]
    assert re.search(why, text)
    assert f"if each {part} is to treat its own rows" in text
    assert "device" not in text and "all_gather" not in text


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_to_split(way, mesh_of):
    part = WAYS[way][1]
    text = refused(MEETING["sum"][0], mesh_of(1), way)
    assert f"in one {part}, and " in text and "in two with half of them each" in text


def test_microbatches_of_one_device_in_the_device_view(mesh_of):
    with pytest.raises(ValueError, match="in one microbatch, and .*leave out accum"):
        first_step(
            lambda p, b: errors(p, b).sum(), mesh_of(1), axis_name="data", accumulate=2
        )


@pytest.mark.parametrize("way", ["shards", "microbatches"])
def test_local_rows_may_be_meant(way, mesh_of):
    _, (_, metrics) = first_step(contrastive, mesh_of(2), rows="local", **WAYS[way][0])
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("way", ["shards", "microbatches"])
@pytest.mark.parametrize("loss", INDEPENDENT.values(), ids=INDEPENDENT)
def test_independent_rows_train_as_a_whole(loss, way, mesh_of, monkeypatch):
    monkeypatch.delattr(Trial, "gaps")  # all of them are proved
    _, (want, metrics) = first_step(loss, mesh_of(1))
    run, (got, other) = first_step(loss, mesh_of(4), **WAYS[way][0])
    want_w, got_w = np.asarray(want.params["w"]), np.asarray(got.params["w"])
    np.testing.assert_allclose(got_w, want_w, rtol=1e-5)
    assert float(other["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    for _ in range(2):
        got, _ = run(got, BATCH)
    assert run.compiles.count == 1


def test_padding_in_microbatches(mesh_of):
    def loss(params, batch):
        each = errors(params, batch).mean(1) * batch["mask"]
        return each.sum() / jnp.maximum(batch["mask"].sum(), 1)

    short = jax.tree.map(lambda x: x[:27], BATCH)
    options = {"accumulate": 2, "remainder": "pad"}
    _, (_, metrics) = first_step(loss, mesh_of(4), short, **options)
    want = errors(START, short).mean()
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-6)


def test_groups_of_neighbours_are_taken_apart(mesh_of):
    """A microbatch has every second row."""

    def loss(params, batch):
        groups = errors(params, batch).mean(1).reshape(-1, 2)
        return jnp.abs(groups - groups.mean(1, keepdims=True)).mean()

    assert "in one microbatch" in refused(loss, mesh_of(1), "microbatches")


def test_a_refused_step_runs_several_steps_no_sooner(mesh_of):
    step = ls.make_train_step(contrastive, optax.sgd(0.1), accumulate=2)
    run, state = ls.parallelize(step, mesh_of(2)), step.init(START)
    batch = run.place_batch(BATCH)
    for _ in range(2):
        with pytest.raises(ValueError, match="rows meet"):
            run.several(run.place_state(state), [(batch,), (batch,)])


def test_sharded_parameters_are_tried_where_they_lie(mesh_of):
    mesh = mesh_of(4)
    split = jax.NamedSharding(mesh, jax.P(None, "data"))
    step = ls.make_train_step(MEETING["max"][0], optax.sgd(0.1), accumulate=2)
    state = step.init({"w": jax.device_put(START["w"], split)})
    with pytest.raises(ValueError, match="rows meet in `reduce_max`"):
        ls.parallelize(step, mesh)(state, BATCH)


def normalised(params, stats, batch):
    hidden = batch["x"] @ params["w"]
    mean, var = hidden.mean(0), hidden.var(0)
    new = {"mean": 0.9 * stats["mean"] + 0.1 * mean}
    return (hidden - mean) / jnp.sqrt(var + 1e-5) - batch["y"], new


@pytest.mark.parametrize(
    "reduce, text",
    [
        (lambda x: (x**2).mean(1), None),
        (lambda x: (x**2).mean(), None),
        (lambda x: (x**2).sum(), "in one microbatch, and"),
        (lambda x: jax.nn.logsumexp(x), "in one microbatch, and"),
        (lambda x: -jnp.diag(jax.nn.log_softmax(x @ x.T)), "in one microbatch, and"),
    ],
    ids=["rows", "mean", "sum", "logsumexp", "contrastive"],
)
def test_batch_norm_of_a_microbatch_is_no_meeting(reduce, text, mesh_of):
    def loss(params, stats, batch):
        out, new = normalised(params, stats, batch)
        return reduce(out), ({}, new)

    step = ls.make_train_step(loss, optax.sgd(0.1), model_state=True, accumulate=2)
    state = step.init(START, model_state={"mean": jnp.zeros(4)})
    run = ls.parallelize(step, mesh_of(4))
    if text is None:
        _, metrics = run(state, BATCH)
        assert np.isfinite(float(metrics["loss"]))
    else:
        with pytest.raises(ValueError, match=text):
            run(state, BATCH)
