"""The first step that is not finite: leaf, device, row, line; saved and replayed."""

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls
from lockstep import notices
from lockstep.compat import pmap
from lockstep.debug import NonFiniteError, nan_guard, replay


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loss_of(w, x):
    logs = jnp.log(x * w["scale"])
    return (logs**2).mean()


def global_step(w, batch):
    loss, grads = jax.value_and_grad(loss_of)(w, batch["x"])
    return jax.tree.map(lambda p, g: p - 0.01 * g, w, grads), {"loss": loss}


def device_step(w, batch):
    loss, grads = jax.value_and_grad(loss_of)(w, batch["x"])
    grads = jax.lax.pmean(grads, "data")
    return jax.tree.map(lambda p, g: p - 0.01 * g, w, grads), {"loss": loss}


def state():
    return {"scale": jnp.float32(1.5)}


def batch(*rows):
    return {"x": np.array(rows, np.float32)}


def wrapped(view, mesh):
    if view == "global":
        return ls.parallelize(global_step, mesh)
    return ls.per_device(device_step, mesh)


@pytest.mark.parametrize("view", ["global", "device"])
class TestInBothViews:
    def test_a_bad_row_of_the_batch_is_named(self, mesh_of, view):
        """Rows 1, 1, nan, 1 on four devices."""
        step = nan_guard(wrapped(view, mesh_of(4)))
        w, _ = step(state(), batch(1, 1, 1, 1))
        with pytest.raises(NonFiniteError) as error:
            step(w, batch(1, 1, np.nan, 1))
        text = str(error.value)
        assert "not finite at step 2" in text
        assert "device 2 (process 0), batch row 2: holds it" in text
        assert "state['scale']: nan" in text and "metrics['loss']: nan" in text
        assert "saved: `lockstep replay run/nan_step_2`" in text
        assert error.value.report.rows == {2: (2,)}

    def test_a_row_from_which_the_step_makes_it_and_the_line(self, mesh_of, view):
        step = nan_guard(wrapped(view, mesh_of(4)), "kept")
        rows = [1, 2, 3, 4, 5, -6, 7, 8]
        with pytest.raises(NonFiniteError) as error:
            step(state(), batch(*rows))
        text = str(error.value)
        assert "device 2 (process 0), batch row 5: makes it" in text
        assert "nan made by `log`" in text
        assert 'in loss_of: logs = jnp.log(x * w["scale"])' in text
        assert error.value.report.origin.line == loss_of.__code__.co_firstlineno + 1
        assert "kept/nan_step_1" in text

    def test_a_state_that_went_wrong_is_no_row(self, mesh_of, view):
        step = nan_guard(wrapped(view, mesh_of(4)))
        with pytest.raises(NonFiniteError) as error:
            step({"scale": jnp.float32(-1)}, batch(*range(1, 9)))
        assert "every device and row makes it: it comes from the state" in str(
            error.value
        )

    def test_a_healthy_run_is_silent_and_the_same(self, mesh_of, view, caplog):
        caplog.set_level(logging.WARNING, logger="lockstep")
        plain, guarded = wrapped(view, mesh_of(4)), wrapped(view, mesh_of(4))
        guarded = nan_guard(guarded, every=2)
        a = b = state()
        for i in range(1, 6):
            rows = batch(*range(i, i + 8))
            (a, _), (b, _) = plain(a, rows), guarded(b, rows)
        assert float(a["scale"]) == float(b["scale"])
        assert guarded.compiles.count == 1 and "finite" not in caplog.text

    def test_a_saved_call_is_replayed_and_a_repair_is_seen(self, mesh_of, view):
        step = nan_guard(wrapped(view, mesh_of(4)))
        with pytest.raises(NonFiniteError) as error:
            step(state(), batch(1, 2, 3, -4))
        again = replay("run/nan_step_1", wrapped(view, mesh_of(4)), state(), batch(0))
        assert again.rows == error.value.report.rows == {3: (3,)}
        assert again.origin == error.value.report.origin

        def repaired(w, batch):
            return global_step(w, {"x": jnp.abs(batch["x"])})

        healed = replay("run/nan_step_1", repaired, state(), batch(0))
        assert "all is finite" in str(healed)


def test_bad_rows_are_found_among_many(mesh_of):
    step = nan_guard(ls.parallelize(global_step, mesh_of(2)))
    rows = np.ones(64, np.float32)
    rows[[3, 40, 41]] = -1
    with pytest.raises(NonFiniteError) as error:
        step(state(), {"x": rows})
    assert error.value.report.rows == {0: (3,), 1: (40, 41)}


def test_padding_keeps_the_numbers_of_the_rows(mesh_of):
    step = ls.make_train_step(
        lambda p, b: jnp.log(b["x"] * p) ** 2, optax.sgd(0.1), axis_name="data"
    )
    guarded = nan_guard(ls.per_device(step, mesh_of(4), remainder="pad"))
    with pytest.raises(NonFiniteError) as error:
        guarded(step.init(jnp.float32(1)), batch(1, 1, 1, 1, -1))
    assert error.value.report.rows == {2: (4,)}
    assert 'jnp.log(b["x"] * p)' in str(error.value)


def test_an_overflow_is_an_infinity(mesh_of):
    def fn(w, x):
        return w * x.max(), None

    step = nan_guard(ls.parallelize(fn, mesh_of(2)))
    w = jnp.float32(1e30)
    with pytest.raises(NonFiniteError, match="state: inf") as error:
        step(w, np.full(4, 1e20, np.float32))
    assert "inf made by `mul`" in str(error.value)


def test_what_only_all_rows_make_is_said_so(mesh_of):
    def fn(w, x):
        return w, jnp.sqrt(8.0 - x.sum())

    step = nan_guard(ls.parallelize(fn, mesh_of(4)))
    with pytest.raises(NonFiniteError, match="no device's part makes it alone"):
        step(0.0, np.full(4, 3.0, np.float32))


def test_a_leaf_that_was_infinite_from_the_start_is_not_watched(mesh_of, caplog):
    notices.reset()

    def fn(state, x):
        return {**state, "w": state["w"] + x.mean()}, None

    step = nan_guard(ls.parallelize(fn, mesh_of(2)))
    step({"best": np.float32(np.inf), "w": 0.0}, np.ones(2, np.float32))
    assert "state['best']: not finite before the first step" in caplog.text


class TestCompatPmap:
    def mapped(self):
        return nan_guard(pmap(device_step, "data", devices=jax.devices()[:4]))

    def stacked(self):
        return {"scale": np.full(4, 1.5, np.float32)}

    def test_a_bad_row_on_one_device(self, caplog):
        mapped = self.mapped()
        x = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
        w, _ = mapped(self.stacked(), {"x": x})
        x[2, 1] = -1
        with pytest.raises(NonFiniteError) as error:
            mapped(w, {"x": x})
        text = str(error.value)
        assert "device_step is not finite at step 2" in text
        assert "device 2 (process 0), batch row 1: makes it" in text
        assert 'in loss_of: logs = jnp.log(x * w["scale"])' in text
        assert "compiling again" not in caplog.text  # to look for the row is no compile

    def test_a_bad_row_in_the_batch_and_the_replay(self):
        x = np.ones((4, 3), np.float32)
        x[3, 0] = np.nan
        with pytest.raises(NonFiniteError, match="device 3 .*row 0: holds it"):
            self.mapped()(self.stacked(), {"x": x})
        again = replay(
            "run/nan_step_1", self.mapped(), self.stacked(), {"x": np.ones((4, 3))}
        )
        assert again.rows == {3: (0,)}

    def test_a_healthy_run_is_silent(self, caplog):
        mapped = self.mapped()
        w = self.stacked()
        for _ in range(3):
            w, _ = mapped(w, {"x": np.ones((4, 3), np.float32)})
        assert caplog.text == "" and mapped.compiles.count == 1


class TestInTheTrainer:
    def train(self, mesh, batches, every=3):
        guard = ls.callbacks.NanGuard("run", every=every)
        trainer = ls.Trainer(global_step, mesh=mesh, callbacks=[guard])
        return trainer, lambda: trainer.fit(state(), batches)

    @pytest.mark.parametrize("bad", [1, 4, 6, 7])
    def test_the_step_is_the_right_one_although_nobody_waited(self, mesh_of, bad):
        batches = [batch(1, 1, -1 if i == bad else 1, 1) for i in range(1, 8)]
        trainer, fit = self.train(mesh_of(4), batches)
        with pytest.raises(NonFiniteError) as error:
            fit()
        assert error.value.report.step == bad
        assert error.value.report.rows == {2: (2,)}
        assert not trainer.parallel.observers

    def test_a_healthy_run_reads_nothing_between_looks(self, mesh_of, monkeypatch):
        reads = []
        get = jax.device_get
        monkeypatch.setattr(jax, "device_get", lambda x: reads.append(1) or get(x))
        _, fit = self.train(mesh_of(4), [batch(1, 2, 3, 4)] * 20, every=10)
        fit()
        assert len(reads) <= 6  # two for each look, and one at the start

    def test_the_steps_go_on_counting(self, mesh_of):
        trainer, fit = self.train(mesh_of(2), [batch(1, 2)] * 4)
        w = fit()
        with pytest.raises(NonFiniteError, match="at step 5"):
            trainer.fit(w, [batch(-1, 2)])


class TestTheRecord:
    def test_is_plain_text_and_arrays(self, mesh_of):
        step = nan_guard(
            ls.parallelize(lambda w, x, key: (w, jnp.log(x).mean()), mesh_of(2))
        )
        key = jax.random.key(7)
        with pytest.raises(NonFiniteError):
            step(jnp.bfloat16(1), np.array([1, -1], np.float32), key)
        text = json.loads(Path("run/nan_step_1/call.json").read_text())
        assert (text["step"], text["devices"], text["platform"]) == (1, 8, "cpu")
        assert text["leaves"]["argument 2"] == "key<fry>[]"
        with np.load("run/nan_step_1/arrays.npz") as arrays:
            np.testing.assert_array_equal(arrays["batch"], [1, -1])
            np.testing.assert_array_equal(arrays["argument 2"], [0, 7])

    def test_of_another_step_is_refused(self, mesh_of):
        step = nan_guard(ls.parallelize(global_step, mesh_of(2)))
        with pytest.raises(NonFiniteError):
            step(state(), batch(1, -1))
        with pytest.raises(ValueError, match=r"takes state\['scale'\] = float32\[3\]"):
            replay(
                "run/nan_step_1",
                global_step,
                {"scale": np.ones(3, np.float32)},
                batch(1),
            )
        with pytest.raises(ValueError, match="holds no saved call"):
            replay("elsewhere", global_step, state(), batch(1))


@pytest.mark.parametrize(
    ("options", "operation"),
    [
        ({}, "log"),
        ({"optimizer_sharding": "data"}, "log"),
        ({"fixed_shards": 4}, "cond"),  # each shard is a computation of its own
    ],
)
def test_a_state_that_is_carried_packed_has_the_users_names(
    mesh_of, options, operation
):
    """Nine leaves in one vector, whole or in slices."""

    def loss(params, batch):
        return sum(jnp.log(batch["x"] * p) ** 2 for p in params.values())

    step = ls.make_train_step(loss, optax.adam(0.1), axis_name="data", **options)
    guarded = nan_guard(ls.per_device(step, mesh_of(4)))
    first = step.init({f"w{i}": jnp.float32(1) for i in range(9)})
    carried, _ = guarded(first, batch(1, 1, 1, 1))
    with pytest.raises(NonFiniteError) as error:
        guarded(carried, batch(1, 1, -1, 1))
    report = error.value.report
    assert report.rows == {2: (2,)} and report.origin.operation == operation
    assert "state.params['w0']: nan" in str(report)
    again = replay("run/nan_step_2", ls.per_device(step, mesh_of(4)), first, batch(0))
    assert again.rows == report.rows and again.origin == report.origin
