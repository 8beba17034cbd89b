"""`evaluate` and `predict`: every row once, whatever the batches and devices."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lockstep import notices
from lockstep.data.prefetching import prefetch
from lockstep.evaluation import evaluate, predict, results
from lockstep.metrics import Mean
from lockstep.parallel import parallelize, per_device
from lockstep.placement import replicate
from lockstep.step import make_train_step

DEVICES = [1, 2, 4, 8]
NINE_OF_TEN = np.array([1] * 9 + [0], np.float32)


def cut(arrays, size=4):
    """Batches of `size` rows and a short last one."""
    rows = len(jax.tree.leaves(arrays)[0])
    parts = [slice(start, start + size) for start in range(0, rows, size)]
    return [jax.tree.map(lambda x, part=part: x[part], arrays) for part in parts]


def scalar(state, batch):
    if "mask" not in batch:
        return {"accuracy": batch["right"].mean()}
    weighted = batch["right"] * batch["mask"]
    return {"accuracy": weighted.sum() / batch["mask"].sum()}


def mean(state, batch):
    return {"accuracy": Mean.of(batch["right"], batch.get("mask"))}


def by_row(state, batch):
    return {"accuracy": batch["right"]}


def by_row_bool(state, batch):
    return {"accuracy": batch["right"] > 0}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("remainder", ["unsplit", "pad"])
@pytest.mark.parametrize("step", [scalar, mean, by_row, by_row_bool])
def test_ten_rows_in_batches_of_four_count_ten_times(mesh_of, step, remainder, devices):
    batches = cut({"right": NINE_OF_TEN})
    got = evaluate(step, 0.0, batches, mesh=mesh_of(devices), remainder=remainder)
    assert got == {"accuracy": pytest.approx(0.9, rel=1e-7)}


@pytest.mark.parametrize("step", [scalar, mean, by_row])
def test_a_short_batch_does_not_weigh_like_a_full_one(mesh_of, step):
    batches = cut({"right": np.array([1] * 8 + [0] * 2, np.float32)})
    assert evaluate(step, 0.0, batches, mesh=mesh_of(4)) == {"accuracy": 0.8}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("step", [mean, by_row, by_row_bool])
def test_the_device_view_counts_padded_batches_exactly(mesh_of, step, devices):
    parallel = per_device(step, mesh_of(devices), remainder="pad")
    batches = cut({"right": NINE_OF_TEN})
    assert evaluate(parallel, 0.0, batches)["accuracy"] == pytest.approx(0.9, rel=1e-7)


def test_a_scalar_of_unequal_shards_is_refused(mesh_of):
    parallel = per_device(scalar, mesh_of(4), remainder="pad")
    full = cut({"right": NINE_OF_TEN[2:]})
    assert evaluate(parallel, 0.0, full) == {"accuracy": 0.875}
    with pytest.raises(ValueError, match="2 real rows of 4 lie unequally on 4 devices"):
        evaluate(parallel, 0.0, cut({"right": NINE_OF_TEN[4:]}))


def test_a_forgotten_mask_is_refused(mesh_of):
    def forgets(state, batch):
        return {"accuracy": batch["right"].mean()}

    batches = cut({"right": NINE_OF_TEN[::-1].copy()}, size=3)
    with pytest.raises(ValueError, match="padding leaks .*accuracy"):
        evaluate(forgets, 0.0, batches, mesh=mesh_of(4), remainder="pad")


def test_rows_that_meet_in_the_step_are_exact_when_unsplit(mesh_of):
    def contrast(state, batch):
        return {"spread": jnp.var(batch["x"])}

    x = np.arange(10, dtype=np.float32) ** 2
    want = sum(np.var(part) * len(part) for part in np.split(x, [4, 8])) / 10
    got = evaluate(contrast, 0.0, cut({"x": x}), mesh=mesh_of(4))
    assert got["spread"] == pytest.approx(want, rel=1e-6)


def test_counts_are_exact_beyond_float32(mesh_of):
    def count(state, batch):
        many = jnp.int32(2**24)
        return {"top": {"1": Mean(many + batch["x"].sum(), many * 2)}}

    batches = [{"x": np.ones(4, np.int32)}] * 3
    got = evaluate(count, 0.0, batches, mesh=mesh_of(4))
    assert got == {"top/1": (2**24 + 4) * 3 / (2**25 * 3)}


def test_padded_batches_compile_once_and_every_evaluation_reuses_it(mesh_of):
    traces = []

    def step(state, batch):
        traces.append(batch["right"].shape)
        return {"accuracy": Mean.of(batch["right"], batch["mask"])}

    for _ in range(2):
        batches = cut({"right": NINE_OF_TEN})
        evaluate(step, 0.0, batches, mesh=mesh_of(4), remainder="pad")
    assert traces == [(4,), (2,)]  # and the real rows of the short one, once


def test_a_short_batch_compiles_once_more_for_all_evaluations(mesh_of):
    step = parallelize(by_row, mesh_of(4), remainder="unsplit")
    for _ in range(3):
        evaluate(step, 0.0, cut({"right": NINE_OF_TEN}))
    assert step.compiles.count == 2


def test_the_state_stays_alive_even_where_the_output_looks_like_it(mesh_of):
    def shifted(w, batch):
        return w + batch["x"].sum()

    state = replicate(np.ones(8, np.float32), mesh_of(4))
    ones = [{"x": np.ones(8, np.float32)}] * 3
    assert predict(shifted, state, ones, mesh=mesh_of(4)).tolist() == [9.0] * 24
    assert evaluate(lambda w, b: {"w": w}, state, ones) == {"w": 1.0}
    assert not state.is_deleted()
    assert float(state.sum()) == 8.0


def test_an_output_of_the_states_shape_may_have_another_dtype(mesh_of):
    def rounded(w, batch):
        return (w * batch["x"]).astype(jnp.int32)

    batches = [{"x": np.full(8, 2.7, np.float32)}]
    got = predict(rounded, jnp.ones(8), batches, mesh=mesh_of(4))
    assert got.tolist() == [2] * 8


def test_the_devices_of_the_state_are_used(mesh_of):
    state = replicate({"w": np.ones(2, np.float32)}, mesh_of(2))
    batches = [{"x": np.ones(2, np.float32)}]
    assert predict(lambda s, b: b["x"] * s["w"][0], state, batches).tolist() == [1, 1]


class TestRefused:
    @pytest.mark.parametrize("call", [evaluate, predict])
    def test_no_batches(self, mesh_of, call):
        used = iter(cut({"right": NINE_OF_TEN}))
        list(used)
        for empty in ([], used):
            with pytest.raises(ValueError, match=f"{call.__name__} got no batch"):
                call(by_row, 0.0, empty, mesh=mesh_of(4))

    def test_a_single_batch(self, mesh_of):
        with pytest.raises(TypeError, match=r"one dict: give \[batch\]"):
            evaluate(by_row, 0.0, {"right": NINE_OF_TEN}, mesh=mesh_of(4))

    def test_a_train_step(self, mesh_of):
        batches = cut({"right": NINE_OF_TEN})
        with pytest.raises(TypeError, match="returned a tuple; a train step"):
            evaluate(lambda s, b: (s, scalar(s, b)), 0.0, batches, mesh=mesh_of(4))
        train = make_train_step(lambda p, b: (p - b["right"]) ** 2, optax.sgd(0.1))
        for step in (train, parallelize(train, mesh_of(4))):
            with pytest.raises(TypeError, match="this is a train step"):
                evaluate(step, train.init(jnp.zeros(())), batches)

    @pytest.mark.parametrize(
        "metric", [lambda b: jnp.ones((4, 2)), lambda b: jnp.ones(3)]
    )
    def test_a_metric_that_is_neither_a_number_nor_rows(self, mesh_of, metric):
        batches = [{"right": NINE_OF_TEN[:4]}]
        with pytest.raises(ValueError, match="metric 'm' is float32 of shape"):
            evaluate(lambda s, b: {"m": metric(b)}, 0.0, batches, mesh=mesh_of(4))

    def test_a_count_is_no_mean_of_rows(self, mesh_of):
        def count(state, batch):
            return {"right": jnp.sum(batch["right"] > 0)}

        batches = cut({"right": NINE_OF_TEN})
        with pytest.raises(ValueError, match=r"'right'.*whole number \(int32\)"):
            evaluate(count, 0.0, batches, mesh=mesh_of(4))
        one = [{"right": NINE_OF_TEN}]
        assert evaluate(count, 0.0, one, mesh=mesh_of(4)) == {"right": 9.0}

    def test_rows_that_would_be_dropped_from_predictions(self, mesh_of):
        with pytest.raises(ValueError, match="leaves rows out"):
            predict(by_row, 0.0, [], mesh=mesh_of(4), remainder="drop")

    def test_another_remainder_or_mesh_than_the_steps(self, mesh_of):
        step = parallelize(by_row, mesh_of(4), remainder="pad")
        with pytest.raises(ValueError, match="remainder='pad' and was asked for"):
            evaluate(step, 0.0, [], remainder="unsplit")
        with pytest.raises(ValueError, match="was asked to run on"):
            evaluate(step, 0.0, [], mesh=mesh_of(2))

    def test_outputs_without_rows(self, mesh_of):
        batches = [{"x": np.ones(4, np.float32)}]
        outputs = {"y": jnp.ones(4), "loss": jnp.ones(())}
        with pytest.raises(ValueError, match=r"output\['loss'\] is float32\[\] for a"):
            predict(lambda s, b: outputs, 0.0, batches, mesh=mesh_of(4))
        with pytest.raises(
            ValueError, match=r"output is float32\[3\] for a batch of 4"
        ):
            predict(lambda s, b: jnp.ones(3), 0.0, batches, mesh=mesh_of(4))


def test_dropped_rows_are_reported(mesh_of, caplog):
    notices.reset()
    batches = cut({"right": NINE_OF_TEN})
    got = evaluate(by_row, 0.0, batches, mesh=mesh_of(4), remainder="drop")
    assert got == {"accuracy": 1.0}
    assert "evaluate left out 2 rows" in caplog.text


def test_an_error_in_the_step_leaves_no_thread(mesh_of):
    def broken(state, batch):
        raise KeyError("logits")

    with pytest.raises(KeyError, match="logits"):
        evaluate(broken, 0.0, cut({"right": NINE_OF_TEN}), mesh=mesh_of(4))
    assert "lockstep-prefetch" not in {t.name for t in threading.enumerate()}


def outputs_of(w, batch):
    """Outputs of several shapes in several containers."""
    double = batch["x"] * w
    return {"y": double, "more": (batch["id"], jnp.stack([double, -double], axis=1))}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("rows", [1, 8, 11])
@pytest.mark.parametrize("how", ["unsplit", "pad", "device view"])
def test_predictions_are_of_the_input_rows_in_their_order(mesh_of, how, rows, devices):
    data = {"x": np.arange(rows, dtype=np.float32), "id": np.arange(rows, dtype="i4")}
    if how == "device view":
        step = per_device(outputs_of, mesh_of(devices), remainder="pad")
    else:
        step = parallelize(outputs_of, mesh_of(devices), remainder=how)
    got = predict(step, 2.0, cut(data, size=8))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(got))
    np.testing.assert_array_equal(got["y"], 2 * data["x"])
    np.testing.assert_array_equal(got["more"][0], data["id"])
    two = np.stack([2 * data["x"], -2 * data["x"]], axis=1)
    np.testing.assert_array_equal(got["more"][1], two)


def test_a_users_own_mask_cuts_no_predictions(mesh_of):
    batches = [{"x": np.arange(3.0, dtype="f4"), "mask": np.array([1, 0, 1], "f4")}]
    step = parallelize(lambda s, b: b["x"], mesh_of(4), remainder="pad")
    assert predict(step, 0.0, batches).tolist() == [0.0, 1.0, 2.0]


def test_batches_may_be_prefetched(mesh_of):
    step = parallelize(mean, mesh_of(4), remainder="pad")
    batches = prefetch(cut({"right": NINE_OF_TEN}), step, size=3)
    for _ in range(2):
        assert evaluate(step, 0.0, batches)["accuracy"] == pytest.approx(0.9)


def test_results_are_read_late(mesh_of, monkeypatch):
    dispatched, reads = [], []
    run, to_host = results._run, results.to_host

    def counted_run(*args):
        dispatched.append(1)
        return run(*args)

    def counted_read(result):
        reads.append(len(dispatched))
        return to_host(result)

    monkeypatch.setattr(results, "_run", counted_run)
    monkeypatch.setattr(results, "to_host", counted_read)
    evaluate(by_row, 0.0, cut({"right": np.ones(32, np.float32)}), mesh=mesh_of(4))
    assert reads == [5, 6, 7, 8, 8, 8, 8, 8]


def test_an_nnx_model_is_a_state(mesh_of):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
            self.out = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    def step(model, batch):
        return model(batch["x"])

    model = Model(nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    want = model(x)
    for devices in (1, 4):
        got = predict(step, model, cut({"x": x}), mesh=mesh_of(devices))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert float(model(x).sum()) == float(want.sum())  # the model is still alive
