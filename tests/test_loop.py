"""The loop: same numbers as by hand, nothing lost, nothing read, nothing kept."""

import gc
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same import assert_same

import lockstep as ls
from lockstep import notices
from lockstep.loop import Trainer


def sgd(w, x):
    """Gradient descent on the mean of (w - x)**2 with rate 1/4: w moves half-way."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((w - x) ** 2))(w)
    return w - 0.25 * grad, {"loss": loss}


def rows(*values):
    """Batches of 8 equal rows."""
    return [np.full(8, value, np.float32) for value in values]


class Recorder:
    """A callback that notes what happens to it."""

    def __init__(self, stop_at=None, fail=None):
        self.events = []
        self.stop_at, self.fail = stop_at, fail

    def _note(self, event):
        self.events.append(event)
        if event == self.fail:
            raise ValueError(f"planted in {event}")

    def start(self, trainer, state):
        self._note("start")

    def observe(self, info):
        self._note(f"observe {info.step}")

    def __call__(self, info):
        self._note(f"call {info.step}")
        return info.step == self.stop_at

    def finish(self, info):
        self._note(f"finish {info.step}")

    def close(self):
        self._note("close")


@pytest.fixture
def said(caplog):
    """The notices of this test, those that are said once included."""
    notices.reset()
    caplog.set_level(logging.INFO, logger="lockstep")
    yield lambda: [record.getMessage() for record in caplog.records]
    notices.reset()


class TestTheNumbers:
    @pytest.mark.parametrize("devices", [1, 4, 8])
    def test_are_those_of_one_device_by_hand(self, mesh_of, devices):
        trainer = Trainer(sgd, mesh=mesh_of(devices))
        infos = [
            (
                info.step,
                info.epoch,
                info.rows,
                info.scalars()["loss"],
                float(info.state),
            )
            for info in trainer.steps(0.0, rows(4, 8), epochs=2)
        ]
        assert infos == [
            (1, 1, 8, 16.0, 2.0),
            (2, 1, 8, 36.0, 5.0),
            (3, 2, 8, 1.0, 4.5),
            (4, 2, 8, 12.25, 6.25),
        ]
        assert float(trainer.state) == 6.25

    def test_of_a_model_are_the_same_as_in_a_plain_loop(self, mesh_of):
        rng = np.random.default_rng(0)
        start = {"w": rng.normal(size=(5, 3)).astype(np.float32)}
        batches = [
            {"x": rng.normal(size=(16, 5)).astype(np.float32), "y": rng.normal(size=16)}
            for _ in range(3)
        ]

        def step(state, batch):
            def loss_of(state):
                out = jnp.tanh(batch["x"] @ state["w"]).sum(-1)
                return jnp.mean((out - batch["y"]) ** 2)

            grads = jax.grad(loss_of)(state)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {}

        want = start
        for batch in batches * 2:
            want, _ = jax.jit(step)(want, batch)
        got = Trainer(step, mesh=mesh_of(8)).fit(start, batches, epochs=2)
        assert_same(jax.device_get(got), jax.device_get(want))

    def test_come_from_a_train_step_with_its_own_state(self, mesh_of):
        import optax

        step = ls.make_train_step(
            lambda w, batch: (w - batch["x"]) ** 2, optax.sgd(0.25)
        )
        trainer = Trainer(step, mesh=mesh_of(8))
        state = trainer.fit(step.init(0.0), [{"x": x} for x in rows(4, 8)])
        assert (float(state.params), int(state.step)) == (5.0, 2)

    def test_come_from_a_step_that_averages_by_itself(self, mesh_of):
        def step(w, x):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((w - x) ** 2))(w)
            return w - 0.25 * jax.lax.pmean(grad, "batch"), loss

        wrapped = ls.per_device(step, mesh_of(4), axis_name="batch")
        trainer = Trainer(wrapped)
        batch = np.repeat(np.array([0, 4, 8, 12], np.float32), 2)
        (info,) = trainer.steps(0.0, [batch])
        assert float(trainer.state) == 3.0
        assert info.scalars() == {"loss": 56.0}  # the mean over the devices


class TestRemainder:
    """Batches of 8 and 5 rows on 8 devices."""

    BATCHES = ({"x": np.full(8, 4.0, np.float32)}, {"x": np.arange(5.0)})

    def test_pad_gives_the_numbers_of_one_device_in_one_program(self, mesh_of):
        def step(w, batch):
            def loss_of(w):
                errors = batch["mask"] * (w - batch["x"]) ** 2
                return errors.sum() / batch["mask"].sum()

            loss, grad = jax.value_and_grad(loss_of)(w)
            return w - 0.25 * grad, {"loss": loss}

        trainer = Trainer(step, mesh=mesh_of(8), remainder="pad", max_compiles=1)
        losses = [i.scalars()["loss"] for i in trainer.steps(0.0, self.BATCHES)]
        assert losses == [16.0, 2.0]  # mean of (2 - x)**2 over 0, 1, 2, 3, 4
        assert float(trainer.state) == 2.0

    def test_drop_leaves_out_a_batch_that_is_too_small(self, mesh_of):
        step = lambda w, batch: (w + batch["x"].mean(), {})  # noqa: E731
        trainer = Trainer(step, mesh=mesh_of(8), remainder="drop")
        assert trainer.fit(0.0, self.BATCHES, epochs=2) == 8.0
        assert trainer.step == 2
        assert trainer.parallel.dropped_rows == 10

    def test_drop_leaves_out_every_batch(self, mesh_of):
        trainer = Trainer(sgd, mesh=mesh_of(8), remainder="drop")
        with pytest.raises(ValueError, match="left out all 9 rows.*8 devices"):
            trainer.fit(0.0, [{"x": np.ones(3)}] * 3)


class TestHowLongItRuns:
    def test_one_epoch_if_nothing_is_said(self):
        trainer = Trainer(sgd)
        trainer.fit(0.0, rows(1, 2, 3))
        assert trainer.step == 3

    def test_steps_go_through_as_many_epochs_as_needed(self):
        trainer = Trainer(sgd)
        epochs = [info.epoch for info in trainer.steps(0.0, rows(1, 2, 3), steps=7)]
        assert epochs == [1, 1, 1, 2, 2, 2, 3]

    def test_the_total_is_known_where_it_can_be(self):
        seen = []
        look = Recorder()
        look.start = lambda trainer, state: seen.append(trainer.total)
        trainer = Trainer(sgd, callbacks=[look])
        trainer.fit(0.0, rows(1, 2, 3), epochs=2)
        trainer.fit(0.0, rows(1, 2, 3), steps=2)
        trainer.fit(0.0, iter(rows(1, 2, 3)))
        assert seen == [6, 2, None]

    def test_an_iterator_is_read_no_further_than_needed(self):
        source = iter(rows(4, 8, 16, 32))
        trainer = Trainer(sgd)
        state = trainer.fit(0.0, source, steps=2)
        assert float(next(source)[0]) == 16
        state = trainer.fit(state, source, steps=1)
        assert (trainer.step, float(state)) == (3, 18.5)

    def test_a_generator_stays_open_for_the_next_run(self):
        def forever():
            while True:
                yield from rows(4)

        source = forever()
        trainer = Trainer(sgd)
        trainer.fit(0.0, source, steps=2)
        assert trainer.fit(trainer.state, source, steps=2) == 3.75

    def test_a_prefetch_is_used_as_it_is(self, mesh_of):
        step = ls.parallelize(sgd, mesh_of(8))
        trainer = Trainer(step)
        assert trainer.fit(0.0, ls.prefetch(rows(4, 8), step), epochs=2) == 6.25

    def test_batches_on_the_devices_need_no_thread(self, mesh_of):
        mesh = mesh_of(8)
        placed = [ls.shard_batch(batch, mesh) for batch in rows(4, 8)]
        before = threading.active_count()
        trainer = Trainer(sgd, mesh=mesh)
        for _ in trainer.steps(0.0, placed, epochs=2):
            assert threading.active_count() == before
        assert float(trainer.state) == 6.25

    @pytest.mark.parametrize(
        ("amount", "message"),
        [
            ({"steps": 0}, "steps=0 trains nothing: it must be at least 1"),
            ({"epochs": 0}, "epochs=0 trains nothing"),
            ({"steps": 2, "epochs": 2}, "give one of them"),
        ],
    )
    def test_no_such_amount(self, amount, message):
        with pytest.raises(ValueError, match=message):
            Trainer(sgd).steps(0.0, rows(1), **amount)

    @pytest.mark.parametrize("count", [2.5, 2.0, True, "3"])
    @pytest.mark.parametrize("name", ["steps", "epochs"])
    def test_an_amount_that_is_no_whole_number(self, name, count):
        with pytest.raises(TypeError, match=f"{name}={count!r} is a .*give an int"):
            Trainer(sgd).steps(0.0, rows(1), **{name: count})

    def test_an_iterator_has_one_epoch(self):
        with pytest.raises(ValueError, match="epochs=2.*iterator.*cannot start again"):
            Trainer(sgd).steps(0.0, iter(rows(1)), epochs=2)

    @pytest.mark.parametrize("empty", [[], iter([])])
    @pytest.mark.parametrize("amount", [{}, {"steps": 3}])
    def test_no_batch_at_all(self, empty, amount):
        trainer = Trainer(sgd)
        with pytest.raises(ValueError, match="held no batch"):
            trainer.fit(1.5, empty, **amount)
        assert float(trainer.state) == 1.5

    def test_a_single_batch_in_place_of_many(self):
        with pytest.raises(TypeError, match=r"\[batch\]"):
            Trainer(sgd).steps(0.0, {"x": np.ones(8)})

    def test_an_iterator_that_ends_early_loses_nothing(self):
        recorder = Recorder()
        trainer = Trainer(sgd, callbacks=[recorder])
        with pytest.raises(
            RuntimeError, match="after 2 steps, before steps=5"
        ) as error:
            trainer.fit(0.0, iter(rows(4, 8)), steps=5)
        assert "steps=2" in str(error.value)
        assert "trainer.state" in str(error.value)
        assert (trainer.step, float(trainer.state)) == (2, 5.0)
        assert recorder.events[-2:] == ["finish 2", "close"]

    def test_batches_that_are_used_up_after_an_epoch(self):
        class Once:
            def __init__(self, source):
                self.source = source

            def __iter__(self):
                return self.source

        trainer = Trainer(sgd)
        with pytest.raises(RuntimeError, match="after 2 steps, before epochs=3"):
            trainer.fit(0.0, Once(iter(rows(4, 8))), epochs=3)
        assert float(trainer.state) == 5.0


class TestTheState:
    def test_of_the_caller_stays_alive(self):
        start = {"w": jnp.zeros(3), "n": np.zeros(2)}
        Trainer(lambda s, x: (jax.tree.map(lambda v: v + 1, s), {})).fit(start, rows(1))
        assert all((value == 0).all() for value in start.values())

    def test_is_always_the_newest_and_never_a_donated_one(self):
        trainer = Trainer(sgd)
        old = None
        for info in trainer.steps(0.0, rows(4, 8)):
            assert info.state is trainer.state
            if old is not None:
                with pytest.raises(RuntimeError, match="step 1 was donated to step 2"):
                    _ = old.state
            old = info

    def test_before_the_first_run(self):
        with pytest.raises(RuntimeError, match="no state yet"):
            _ = Trainer(sgd).state

    def test_that_was_given_to_a_run_cannot_be_given_again(self):
        trainer = Trainer(sgd)
        state = trainer.fit(0.0, rows(4))
        trainer.fit(state, rows(8))
        with pytest.raises(RuntimeError, match="was donated"):
            trainer.fit(state, rows(8))

    def test_survives_a_bad_batch(self):
        trainer = Trainer(sgd)
        with pytest.raises(ValueError, match="10 rows"):
            trainer.fit(0.0, [*rows(4), np.ones(10, np.float32)])
        assert (trainer.step, float(trainer.state)) == (1, 2.0)

    def test_that_a_failed_step_took_is_reported(self, monkeypatch):
        trainer = Trainer(sgd)
        trainer.fit(0.0, rows(4))

        def broken(state, batch):
            state.delete()
            raise MemoryError("planted")

        broken.place_state = lambda state: state
        broken.compiles, broken.mesh = trainer.parallel.compiles, trainer.mesh
        broken.place_batch, broken.dropped_rows = trainer.parallel.place_batch, 0
        broken.remainder = "error"
        monkeypatch.setattr(trainer, "parallel", broken)
        with pytest.raises(MemoryError) as error:
            trainer.fit(trainer.state, rows(4))
        assert error.value.__notes__ == ["in step 2 (epoch 1)"]
        with pytest.raises(RuntimeError, match="after step 1 is gone: step 2"):
            _ = trainer.state

    def test_counts_on_where_it_was_and_else_from_the_start(self):
        trainer = Trainer(sgd)
        state = trainer.fit(0.0, rows(4, 8))
        (info,) = trainer.steps(state, rows(4))
        assert info.step == 3
        (info,) = trainer.steps(0.0, rows(4))
        assert info.step == 1

    def test_compiles_once_in_a_run(self):
        trainer = Trainer(sgd, max_compiles=1)
        trainer.fit(0.0, rows(1, 2, 3), epochs=2)
        assert trainer.parallel.compiles.count == 1

    def test_and_an_odd_batch_is_stopped_before_it_compiles(self):
        trainer = Trainer(sgd, max_compiles=1)
        with pytest.raises(RuntimeError, match="max_compiles=1.*\\[8\\].*\\[16\\]"):
            trainer.fit(0.0, [*rows(4), np.ones(16, np.float32)])
        assert float(trainer.state) == 2.0


class TestTheContract:
    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda w, x: w, "returned one"),
            (lambda w, x: (w, x.mean(), x.sum()), "returned 3 values"),
        ],
    )
    def test_a_step_that_returns_no_pair(self, step, message):
        with pytest.raises(TypeError, match=message) as error:
            Trainer(step).fit(0.0, rows(1, 2))
        assert "return state, {'loss': loss}" in str(error.value)

    def test_a_state_that_changes_its_shape_is_named(self):
        def grow(state, x):
            return {"w": jnp.concatenate([state["w"], state["w"]]), "b": state["b"]}, {}

        with pytest.raises(TypeError, match=r"state\['w'\].*\[3\].*\[6\]"):
            Trainer(grow).fit({"w": np.zeros(3), "b": np.zeros(2)}, rows(1, 2))

    def test_a_state_of_another_structure(self):
        with pytest.raises(TypeError, match="state"):
            Trainer(lambda s, x: ((s, s), {})).fit({"w": np.zeros(3)}, rows(1, 2))

    def test_a_bare_number_is_the_loss_and_no_metrics_are_none(self):
        (info,) = Trainer(lambda w, x: (w, x.mean())).steps(0.0, rows(3))
        assert info.scalars() == {"loss": 3.0}
        (info,) = Trainer(lambda w, x: (w, None)).steps(0.0, rows(3))
        assert info.scalars() == {}

    def test_a_metric_that_is_no_number_is_named(self):
        (info,) = Trainer(lambda w, x: (w, {"all": x})).steps(0.0, rows(3))
        with pytest.raises(ValueError, match="'all'.*shape \\(8,\\)"):
            info.scalars()

    def test_an_error_in_the_step_names_the_step(self):
        def broken(w, x):
            raise KeyError("planted")

        with pytest.raises(KeyError) as error:
            Trainer(broken).fit(0.0, rows(1))
        assert "in step 1 (epoch 1)" in error.value.__notes__


class TestKeys:
    @staticmethod
    def draw(w, x, key):
        return w, {"bits": jax.random.uniform(key)}

    @pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
    def test_each_step_gets_its_own_by_its_number(self, make):
        base = make(7)
        trainer = Trainer(self.draw, key=base)
        got = [info.scalars()["bits"] for info in trainer.steps(0.0, rows(1), steps=20)]
        want = [float(jax.random.uniform(ls.step_key(base, i))) for i in range(20)]
        assert got == want
        assert len(set(got)) == 20
        assert trainer.parallel.compiles.count == 1

    def test_a_second_run_of_the_state_repeats_no_key(self):
        trainer = Trainer(self.draw, key=jax.random.key(7))
        (first,) = trainer.steps(0.0, rows(1))
        (second,) = trainer.steps(trainer.state, rows(1))
        assert first.scalars() != second.scalars()

    def test_devices_draw_differently_in_the_device_view(self, mesh_of):
        def draw(w, x, key):
            return w, {"spread": jax.lax.pmean(jax.random.uniform(key), "data")}

        wrapped = ls.per_device(draw, mesh_of(4))
        base = jax.random.key(7)
        (info,) = Trainer(wrapped, key=base).steps(0.0, rows(1))
        key = ls.step_key(base, 0)
        parts = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(4)]
        assert info.scalars()["spread"] == pytest.approx(np.mean(parts), rel=1e-6)

    def test_a_step_that_needs_one_says_so_at_once(self):
        with pytest.raises(TypeError, match="draw takes a third.*key=jax.random.key"):
            Trainer(self.draw)

    def test_an_optional_key_may_be_left_out(self):
        def draw(w, x, key=None):
            return w, {"given": jnp.float32(key is not None)}

        (info,) = Trainer(draw).steps(0.0, rows(1))
        assert info.scalars() == {"given": 0.0}
        (info,) = Trainer(draw, key=jax.random.key(0)).steps(0.0, rows(1))
        assert info.scalars() == {"given": 1.0}

    def test_a_default_that_is_no_key_is_kept(self, said):
        def step(w, x, lr=0.5):
            return w, {"lr": jnp.float32(lr)}

        (info,) = Trainer(step, key=jax.random.key(0)).steps(0.0, rows(1))
        assert info.scalars() == {"lr": 0.5}
        assert any("is not used: step takes no key" in text for text in said())

    def test_more_arguments_have_no_place(self):
        with pytest.raises(TypeError, match="needs 4 arguments.*functools.partial"):
            Trainer(lambda w, x, lr, key: (w, {}), key=jax.random.key(0))

    def test_a_train_step_says_itself_what_it_takes(self):
        import optax

        def loss(w, batch, key):
            return (w - batch) ** 2 + 0 * jax.random.uniform(key)

        step = ls.make_train_step(loss, optax.sgd(0.25))
        base = jax.random.key(0)
        state = Trainer(step).fit(step.init(0.0, key=base), rows(4))
        assert float(state.params) == 2.0
        state = Trainer(step, key=base).fit(step.init(0.0), rows(4))
        assert float(state.params) == 2.0
        with pytest.raises(ValueError, match="takes a key.*there is none"):
            Trainer(step).fit(step.init(0.0), rows(4))


class TestCallbacks:
    def test_are_called_in_order(self):
        recorder = Recorder()
        Trainer(sgd, callbacks=[recorder]).fit(0.0, rows(1, 2))
        assert recorder.events == [
            "start",
            *("observe 1", "call 1", "observe 2", "call 2"),
            *("finish 2", "close"),
        ]

    def test_may_be_plain_functions_and_see_earlier_results(self):
        seen = []
        first = lambda info: info.results.update(valid=float(info.step))  # noqa: E731
        second = lambda info: seen.append(dict(info.results))  # noqa: E731
        Trainer(sgd, callbacks=[first, second]).fit(0.0, rows(1, 2))
        assert seen == [{"valid": 1.0}, {"valid": 2.0}]

    @pytest.mark.parametrize(
        ("bad", "message"),
        [(Recorder, "is the class Recorder: make one"), ("log", "is a str")],
    )
    def test_are_checked_before_a_step_is_run(self, bad, message):
        with pytest.raises(TypeError, match=f"callbacks.1. {message}"):
            Trainer(sgd, callbacks=[print, bad])

    def test_stop_after_the_step_when_one_returns_true(self):
        other = Recorder()
        trainer = Trainer(sgd, callbacks=[Recorder(stop_at=2), other])
        infos = list(trainer.steps(0.0, rows(1, 2, 3), epochs=5))
        assert [info.step for info in infos] == [1, 2]
        assert other.events[-3:] == ["call 2", "finish 2", "close"]

    def test_stop_before_the_batches_end_is_no_complaint(self):
        trainer = Trainer(sgd, callbacks=[Recorder(stop_at=1)])
        assert float(trainer.fit(0.0, iter(rows(4)), steps=9)) == 2.0

    @pytest.mark.parametrize("where", ["start", "observe 2", "call 2"])
    def test_that_fail_are_named_and_all_are_closed(self, where):
        good, bad, late = Recorder(), Recorder(fail=where), Recorder()
        trainer = Trainer(sgd, callbacks=[good, bad, late])
        with pytest.raises(ValueError, match="planted") as error:
            trainer.fit(0.0, rows(4, 8, 16))
        (note,) = error.value.__notes__
        assert "Recorder" in note
        assert "step 2" in note or where == "start"
        assert good.events[-1] == bad.events[-1] == "close"
        assert late.events[-1:] == ([] if where == "start" else ["close"])
        assert "finish 2" not in good.events
        assert float(trainer.state) == (0.0 if where == "start" else 5.0)

    @pytest.mark.parametrize("where", ["finish 2", "close"])
    def test_that_fail_at_the_end_keep_no_other_from_its_end(self, where):
        bad, late = Recorder(fail=where), Recorder()
        trainer = Trainer(sgd, callbacks=[bad, late])
        with pytest.raises(ValueError, match="planted") as error:
            trainer.fit(0.0, rows(4, 8))
        assert "Recorder" in error.value.__notes__[0]
        assert late.events[-2:] == ["finish 2", "close"]
        assert float(trainer.state) == 5.0

    def test_a_failure_while_closing_does_not_hide_the_first(self):
        first, second = Recorder(fail="call 1"), Recorder(fail="close")
        with pytest.raises(ValueError, match="planted in call 1") as error:
            Trainer(sgd, callbacks=[first, second]).fit(0.0, rows(1))
        assert any("planted in close" in note for note in error.value.__notes__)

    def test_finish_when_the_loop_is_left(self):
        recorder = Recorder()
        trainer = Trainer(sgd, callbacks=[recorder])
        for info in trainer.steps(0.0, rows(4, 8, 16)):
            if info.step == 2:
                break
        gc.collect()
        assert recorder.events[-2:] == ["finish 2", "close"]
        assert float(trainer.state) == 5.0


class TestTheCost:
    def test_seconds_are_those_of_the_clock(self):
        times = iter([100.0, 103.0, 103.5, 104.5])
        trainer = Trainer(sgd, clock=lambda: next(times))
        infos = list(trainer.steps(0.0, rows(1, 2, 3)))
        assert [info.seconds for info in infos] == [3.0, 0.5, 1.0]
        assert [info.compiled for info in infos] == [True, False, False]

    def test_reading_every_step_is_hinted_at_once(self, said):
        trainer = Trainer(sgd)
        for info in trainer.steps(0.0, rows(1, 2, 3, 4)):
            if info.step % 2:
                info.scalars()
        hints = [text for text in said() if "after every step" in text]
        assert hints == []
        for info in trainer.steps(0.0, rows(1, 2, 3, 4)):
            info.scalars()
        hints = [text for text in said() if "after every step" in text]
        assert len(hints) == 1
        assert "every(n, Log(...))" in hints[0]

    def test_old_infos_hold_no_state_and_without_the_trainer_nothing_does(self):
        def big_arrays():
            return sum(x.shape == (1001,) for x in jax.live_arrays())

        log = ls.every(2, ls.callbacks.Log(ls.writers.Console()))
        callbacks = [log, ls.callbacks.StopOnNonFinite(), ls.callbacks.Progress()]
        trainer = Trainer(lambda s, x: (s + 1, {"n": x.sum()}), callbacks=callbacks)
        infos = list(trainer.steps(np.zeros(1001), rows(1, 2, 3)))
        assert len(infos) == 3
        assert big_arrays() == 1
        gc.disable()
        try:
            del trainer, infos
            assert big_arrays() == 0
        finally:
            gc.enable()
