"""Runs that stop and go on: the same batches, the same bits, on any devices."""

import json
import logging
import os

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fresh_process import run_python
from same import assert_same

import lockstep as ls
from lockstep import notices

ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
BATCH = {"x": ROWS, "id": np.arange(40)}
OPTIMIZER = optax.adam(0.1)


@pytest.fixture
def said(caplog):
    """The notices of this test, those that are said once included."""
    notices.reset()
    caplog.set_level(logging.WARNING, logger="lockstep")
    yield lambda: "\n".join(
        r.getMessage() for r in caplog.records if r.name == "lockstep"
    )
    notices.reset()


def train_step(state, batch, key):
    params, opt_state = state

    def loss_of(params):
        noise = jax.random.bernoulli(key, 0.9, batch["x"].shape)
        return jnp.mean((batch["x"] * noise @ params["w"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (params, opt_state), {"loss": loss, "ids": batch["id"]}


def arrays(seed=1, mesh=None, **size):
    """40 rows in another order each epoch; 5 batches of 8."""
    size = size or {"global_batch_size": 8}
    return ls.data.batches(BATCH, seed=seed, mesh=mesh, **size)


def hosts(rows=8):
    """The same rows as a list of batches, in their order."""
    return [
        {name: x[i : i + rows] for name, x in BATCH.items()} for i in range(0, 40, rows)
    ]


class Loader:
    """A re-iterable that does not know where it stands."""

    def __iter__(self):
        yield from hosts()


def grain_batches():
    def row(i):
        return {"x": ROWS[i], "id": np.int64(i)}

    source = grain.MapDataset.range(40).shuffle(seed=3).map(row).batch(8)
    return source.to_iter_dataset(grain.ReadOptions(0, 0))


class Run:
    """A process of its own, as far as a run can tell."""

    def __init__(self, directory, mesh, key=0, **options):
        calls = options.pop("steps_per_call", 1)
        remainder = options.pop("remainder", None)
        self.callbacks = options.pop("callbacks", [])
        self.trainer = ls.Trainer(
            train_step,
            mesh=mesh,
            key=jax.random.key(key),
            callbacks=[*self.callbacks, self],
            steps_per_call=calls,
            remainder=remainder,
            checkpoints=ls.Checkpointer(directory, **{"every": 100} | options),
        )
        self.state = ({"w": np.ones(3, np.float32)}, OPTIMIZER.init({"w": jnp.ones(3)}))
        self.ids, self.losses = [], []

    def observe(self, info):
        self.ids.append(np.sort(info.metrics["ids"]).tolist())
        self.losses.append(float(info.metrics["loss"]))

    def __call__(self, info):
        pass

    def fit(self, batches, **amount):
        self.state = self.trainer.fit(self.state, batches, **amount)
        return self


def assert_bits(got, want):
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.array_equal(left, right)


SOURCES = {"arrays": arrays, "grain": grain_batches, "list": hosts, "loader": Loader}


class TestFiveAndFiveAreTen:
    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("first", [3, 5, 7])
    def test_with_the_same_batches_and_the_same_bits(
        self, tmp_path, mesh_of, source, first
    ):
        make = SOURCES[source]
        straight = Run(tmp_path / "a", mesh_of(4)).fit(make(), steps=10)
        one = Run(tmp_path / "b", mesh_of(4)).fit(make(), steps=first)
        two = Run(tmp_path / "b", mesh_of(4)).fit(make(), steps=10)
        assert two.trainer.step == two.trainer.total == 10
        assert one.ids + two.ids == straight.ids
        assert one.losses + two.losses == straight.losses
        assert_bits(two.state, straight.state)

    def test_in_epochs(self, tmp_path, mesh_of):
        straight = Run(tmp_path / "a", mesh_of(2)).fit(arrays(), epochs=3)
        ids = []
        for steps in (4, 5, 11):
            ids += Run(tmp_path / "b", mesh_of(2)).fit(arrays(), steps=steps).ids
        last = Run(tmp_path / "b", mesh_of(2)).fit(arrays(), epochs=3)
        assert ids + last.ids == straight.ids
        assert_bits(last.state, straight.state)
        for epoch in range(3):
            seen = sum(straight.ids[5 * epoch : 5 * epoch + 5], [])
            assert sorted(seen) == list(range(40))
        assert straight.ids[:5] != straight.ids[5:10]

    def test_with_an_iterator(self, tmp_path, mesh_of, said):
        straight = Run(tmp_path / "a", mesh_of(2)).fit(iter(hosts()))
        one = Run(tmp_path / "b", mesh_of(2)).fit(iter(hosts()), steps=2)
        two = Run(tmp_path / "b", mesh_of(2)).fit(iter(hosts()))
        assert one.ids + two.ids == straight.ids
        assert_bits(two.state, straight.state)
        assert "2 of them are read and left out" in said()

    def test_with_several_steps_a_call(self, tmp_path, mesh_of):
        """Groups end with each epoch, and nothing is read beyond one."""
        straight = Run(tmp_path / "a", mesh_of(2)).fit(arrays(), steps=12)
        one = Run(tmp_path / "b", mesh_of(2), steps_per_call=3).fit(arrays(), steps=5)
        two = Run(tmp_path / "b", mesh_of(2), steps_per_call=3).fit(arrays(), steps=12)
        assert one.ids + two.ids == straight.ids
        assert_same(jax.device_get(two.state), jax.device_get(straight.state))

    def test_with_a_short_last_batch(self, tmp_path, mesh_of):
        def fit(name, steps):
            run = Run(tmp_path / name, mesh_of(8), remainder="unsplit")
            return run.fit(arrays(global_batch_size=16), steps=steps)

        straight = fit("a", 7)
        pieces = [fit("b", steps) for steps in (2, 3, 7)]
        assert sum((piece.ids for piece in pieces), []) == straight.ids
        assert [len(ids) for ids in straight.ids] == [16, 16, 8, 16, 16, 8, 16]
        assert_bits(pieces[-1].state, straight.state)

    @pytest.mark.parametrize("options", [{}, {"axis_name": "data"}])
    @pytest.mark.parametrize(
        "batches", [lambda: arrays(global_batch_size=16), lambda: hosts(16)]
    )
    def test_right_before_a_padded_batch(self, tmp_path, mesh_of, options, batches):
        """It is padded as in the run that did not stop, so draws and sums agree."""

        def loss(params, batch, key):
            noise = jax.random.bernoulli(key, 0.8, batch["x"].shape)
            return (batch["x"] * noise @ params["w"] - 1) ** 2

        def fit(name, steps):
            step = ls.make_train_step(loss, OPTIMIZER, **options)
            trainer = ls.Trainer(
                step,
                mesh=mesh_of(8),
                checkpoints=ls.Checkpointer(tmp_path / name),
                remainder="pad",
                max_compiles=1,
            )
            state = step.init({"w": jnp.ones(3)}, key=jax.random.key(0))
            return trainer.fit(state, batches(), steps=steps)

        straight = fit("a", 6)
        fit("b", 2)
        kept = fit("b", 6)
        assert_bits(kept.params, straight.params)
        assert_bits(kept.opt_state, straight.opt_state)

    def test_after_the_body_of_a_loop_left_it(self, tmp_path, mesh_of):
        straight = Run(tmp_path / "a", mesh_of(2)).fit(arrays(), steps=6)
        one = Run(tmp_path / "b", mesh_of(2))
        for info in one.trainer.steps(one.state, arrays(), steps=6):
            if info.step == 2:
                break
        two = Run(tmp_path / "b", mesh_of(2)).fit(arrays(), steps=6)
        assert one.ids + two.ids == straight.ids
        assert_bits(two.state, straight.state)


class TestARestartedScript:
    def test_that_was_complete_trains_nothing(self, tmp_path, mesh_of, said):
        one = Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        two = Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        assert (two.ids, two.trainer.step) == ([], 4)
        assert_bits(two.state, one.state)
        assert "all 4 steps were done: nothing to train" in said()

    def test_that_was_complete_may_be_longer_now(self, tmp_path, mesh_of):
        Run(tmp_path, mesh_of(2)).fit(arrays(), epochs=1)
        longer = Run(tmp_path, mesh_of(2)).fit(arrays(), epochs=2)
        assert (len(longer.ids), longer.trainer.step) == (5, 10)

    def test_with_two_calls_of_fit_goes_on_in_the_second(self, tmp_path, mesh_of):
        def script(name, second):
            run, data = Run(tmp_path / name, mesh_of(2)), arrays()
            run.fit(data, steps=3)
            return run.fit(data, steps=second)

        straight = script("a", 4)
        one = script("b", 2)
        two = script("b", 4)
        assert two.ids == straight.ids[5:]
        assert one.ids + two.ids == straight.ids
        assert_bits(two.state, straight.state)

    def test_says_where_it_goes_on(self, tmp_path, mesh_of, said):
        Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        Run(tmp_path, mesh_of(2)).fit(arrays(), steps=5)
        assert f"goes on after step 4, from {tmp_path / '4'}" in said()

    def test_goes_on_from_the_last_whole_checkpoint(self, tmp_path, mesh_of, said):
        straight = Run(tmp_path / "a", mesh_of(2), every=2).fit(arrays(), steps=6)
        Run(tmp_path / "b", mesh_of(2), every=2).fit(arrays(), steps=5)
        (tmp_path / "b" / "5" / "run" / "metadata").write_text("{")
        two = Run(tmp_path / "b", mesh_of(2), every=2).fit(arrays(), steps=6)
        assert two.ids == straight.ids[4:]
        assert_bits(two.state, straight.state)

    def test_compiles_once_and_donates(self, tmp_path, mesh_of):
        run = Run(tmp_path, mesh_of(8))
        start = run.state
        run.fit(arrays(), steps=3)
        compiles = run.trainer.parallel.compiles.count
        run.state = start  # as a script that starts again, with the program at hand
        infos = run.trainer.steps(run.state, arrays(), steps=5)
        next(infos)
        first = run.trainer.state
        places = [
            x.addressable_shards[0].data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(first)
        ]
        next(infos)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        again = [
            x.addressable_shards[0].data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(run.trainer.state)
        ]
        assert places == again
        assert run.trainer.step == 5
        assert run.trainer.parallel.compiles.count == compiles == 1

    def test_loses_nothing_when_it_is_another_model(self, tmp_path, mesh_of):
        one = Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        two = Run(tmp_path, mesh_of(2))
        two.state = ({"w": jnp.ones(3)}, optax.sgd(0.1, 0.9).init({"w": jnp.ones(3)}))
        with pytest.raises(ValueError, match=r"state\[1\]\[0\]\.count .* is only in"):
            two.fit(arrays(), steps=6)
        three = Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        assert_bits(three.state, one.state)

    def test_with_another_key_is_refused(self, tmp_path, mesh_of):
        Run(tmp_path, mesh_of(2), key=0).fit(arrays(), steps=2)
        with pytest.raises(
            ValueError, match=r"key \[0, 0\] .*, and now has .* \[0, 1\]"
        ):
            Run(tmp_path, mesh_of(2), key=1).fit(arrays(), steps=4)

    def test_with_another_key_in_its_state_is_refused(self, tmp_path, mesh_of):
        def script(seed, steps):
            def loss(w, batch, key):
                return (batch["x"] @ w) ** 2 + jax.random.normal(key)

            step = ls.make_train_step(loss, OPTIMIZER)
            state = step.init(jnp.ones(3), key=jax.random.key(seed))
            checkpoints = ls.Checkpointer(tmp_path)
            trainer = ls.Trainer(step, mesh=mesh_of(2), checkpoints=checkpoints)
            return trainer.fit(state, hosts(), steps=steps)

        script(0, 2)
        with pytest.raises(
            ValueError, match=r"key \[0, 0\] .*, and now has .* \[0, 1\]"
        ):
            script(1, 3)
        assert int(script(0, 3).step) == 3

    def test_for_fewer_steps_than_it_has_done_trains_nothing(
        self, tmp_path, mesh_of, said
    ):
        Run(tmp_path, mesh_of(2)).fit(arrays(), steps=7)
        shorter = Run(tmp_path, mesh_of(2)).fit(arrays(), steps=4)
        assert (shorter.ids, shorter.trainer.step) == ([], 7)
        shorter = Run(tmp_path, mesh_of(2)).fit(arrays(), epochs=1)
        assert (shorter.ids, shorter.trainer.step) == ([], 7)
        assert said().count("all 7 steps were done: nothing to train") == 2

    def test_passes_over_a_call_whose_length_is_not_known(self, tmp_path, mesh_of):
        def script(second):
            run = Run(tmp_path, mesh_of(2))
            run.fit(Loader(), epochs=1)
            return run.fit(arrays(), steps=second)

        assert len(script(2).ids) == 7
        assert len(script(4).ids) == 2

    def test_with_other_data_is_refused(self, tmp_path, mesh_of):
        Run(tmp_path, mesh_of(2)).fit(arrays(seed=1), steps=2)
        with pytest.raises(
            ValueError, match="data with seed=1, and this data has seed=2"
        ):
            Run(tmp_path, mesh_of(2)).fit(arrays(seed=2), steps=4)
        with pytest.raises(ValueError, match=r"\(Batches\) that knew .* \(list\) are"):
            Run(tmp_path, mesh_of(2)).fit(hosts(), steps=4)

    def test_whose_iterator_is_too_short_is_refused(self, tmp_path, mesh_of):
        Run(tmp_path, mesh_of(2)).fit(iter(hosts()), steps=4)
        with pytest.raises(ValueError, match="had read 4 batches, .* ends after 3"):
            Run(tmp_path, mesh_of(2)).fit(iter(hosts()[:3]), steps=5)


class TestStrict:
    @pytest.mark.parametrize("make", [Loader, lambda: iter(hosts())])
    def test_refuses_batches_without_a_position_at_once(self, tmp_path, mesh_of, make):
        run = Run(tmp_path, mesh_of(2), strict=True)
        with pytest.raises(ValueError, match="do not know their position"):
            run.fit(make(), steps=3)
        assert run.ids == []

    @pytest.mark.parametrize("make", [arrays, grain_batches, hosts])
    def test_takes_the_others(self, tmp_path, mesh_of, make):
        assert len(Run(tmp_path, mesh_of(2), strict=True).fit(make(), steps=3).ids) == 3


class TestWhatIsSaved:
    def test_every_so_many_steps_and_the_last(self, tmp_path, mesh_of):
        run = Run(tmp_path, mesh_of(2), every=3, keep=None)
        run.fit(arrays(), steps=7)
        assert run.trainer.checkpoints.steps == [3, 6, 7]

    def test_at_the_end_of_the_call_in_which_it_was_due(self, tmp_path, mesh_of):
        run = Run(tmp_path, mesh_of(2), every=2, keep=None, steps_per_call=3)
        run.fit(arrays(), steps=5)
        assert run.trainer.checkpoints.steps == [3, 5]  # the calls are 1 2 3, 4 5

    def test_the_best_is_kept_whatever_comes_later(self, tmp_path, mesh_of):
        losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 5.0}

        def evaluate(info):
            if info.step in losses:
                info.results["valid/loss"] = losses[info.step]

        def script(best_is, steps):
            options = {"every": 3, "keep": 1, "best": "valid/loss", "best_is": best_is}
            run = Run(tmp_path / best_is, mesh_of(2), callbacks=[evaluate], **options)
            run.fit(arrays(), steps=steps)
            return run.trainer.checkpoints.steps

        assert script("min", 5) == [4, 5]
        assert script("min", 12) == [4, 12]  # known again after a restart
        assert script("max", 12) == [10, 12]
        known = ls.Checkpointer(tmp_path / "max", best="valid/loss", best_is="max")
        assert known.best_step == 10
        assert ls.Checkpointer(tmp_path / "max").best_step is None

    def test_a_best_that_is_never_found_is_said(self, tmp_path, mesh_of, said):
        def evaluate(info):
            info.results["valid/loss"] = 1.0

        run = Run(tmp_path, mesh_of(2), callbacks=[evaluate], best="valid/los")
        run.fit(arrays(), steps=2)
        assert "best='valid/los' is not among the results of this run (valid/loss)" in (
            said()
        )

    def test_not_after_a_failure_but_what_was_saved_before_stays(
        self, tmp_path, mesh_of
    ):
        def fail(info):
            if info.step == 5:
                raise ValueError("planted")

        run = Run(tmp_path, mesh_of(2), every=2, callbacks=[fail])
        with pytest.raises(ValueError, match="planted"):
            run.fit(arrays(), steps=8)
        assert run.trainer.checkpoints.steps == [2, 4]

    def test_a_write_that_fails_ends_the_run_with_step_and_path(
        self, tmp_path, mesh_of
    ):
        run = Run(tmp_path / "run", mesh_of(2), every=2)

        def spoil(info):
            if info.step == 3:  # no folder can be made in the place of a file
                run.trainer.checkpoints.wait()
                (tmp_path / "run").rename(tmp_path / "moved")
                (tmp_path / "run").touch()

        run.trainer.callbacks += (spoil,)
        with pytest.raises(
            RuntimeError, match=r"step 4 could not .*/run cannot be made"
        ):
            run.fit(arrays(), steps=6)
        assert run.trainer.step == 4
        assert (tmp_path / "moved" / "2" / "_CHECKPOINT_METADATA").is_file()

    def test_a_path_is_no_checkpointer(self):
        with pytest.raises(TypeError, match="'run' is a str: say .*Checkpointer"):
            ls.Trainer(train_step, key=jax.random.key(0), checkpoints="run")

    def test_a_run_without_checkpoints_writes_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        ls.Trainer(lambda s, x: (s + 1, {})).fit(0.0, [np.ones(8)] * 3)
        assert list(tmp_path.iterdir()) == []


class TestPackedAndShardedStates:
    """A step may keep a state in another form; saved is what its user sees."""

    @pytest.mark.parametrize(
        "options",
        [{}, pytest.param({"optimizer_sharding": "data"}, marks=pytest.mark.full)],
    )
    def test_go_on_on_other_devices(self, tmp_path, mesh_of, options):
        def loss(params, batch):
            return sum((batch["x"] @ p["w"] + p["b"]) ** 2 for p in params)

        def script(name, devices, steps):
            step = ls.make_train_step(
                loss, OPTIMIZER, axis_name="data", ema=0.9, **options
            )
            trainer = ls.Trainer(
                step,
                mesh=mesh_of(devices),
                max_compiles=1,
                checkpoints=ls.Checkpointer(tmp_path / name),
            )
            params = [
                {"w": jnp.full(3, 0.1 * i), "b": jnp.zeros(())} for i in range(12)
            ]
            return trainer.fit(step.init(params), arrays(), steps=steps)

        straight = script("a", 8, 6)
        for devices, steps in ((8, 2), (2, 4), (8, 6)):
            state = script("b", devices, steps)
        assert_same(jax.device_get(state), jax.device_get(straight))


class TestFixedShards:
    """A run that promises bits checks what they depend on."""

    def script(self, directory, mesh, steps, data=None, **options):
        def loss(params, batch):
            return (batch["x"] @ params["w"]) ** 2

        step = ls.make_train_step(loss, OPTIMIZER, axis_name="data", fixed_shards=8)
        checkpoints = ls.Checkpointer(directory, **options)
        trainer = ls.Trainer(step, mesh=mesh, checkpoints=checkpoints)
        return trainer.fit(step.init({"w": jnp.ones(3)}), data or arrays(), steps=steps)

    def test_go_on_with_the_same_bits_under_the_same_conditions(
        self, tmp_path, mesh_of
    ):
        straight = self.script(tmp_path / "a", mesh_of(8), 4)
        self.script(tmp_path / "b", mesh_of(2), 2)
        kept = self.script(tmp_path / "b", mesh_of(8), 4)
        assert_bits(kept, straight)

        run = tmp_path / "b" / "4" / "run" / "metadata"
        saved = json.loads(run.read_text())
        saved["conditions"]["xla_flags"] = "--xla_cpu_enable_fast_math=true"
        run.write_text(json.dumps(saved))
        with pytest.raises(
            ValueError, match="xla_flags: --xla_cpu_enable_fast_math=true"
        ):
            self.script(tmp_path / "b", mesh_of(8), 5)

    def test_keep_their_batch_under_every_policy(self, tmp_path, mesh_of):
        self.script(tmp_path, mesh_of(8), 2)
        other = arrays(global_batch_size=16)
        for policy in ("linear-scaling", None):
            with pytest.raises(
                ValueError, match="batches of 8 rows, and these have 16"
            ):
                self.script(tmp_path, mesh_of(8), 4, other, policy=policy)


ELSEWHERE = """
import sys
import numpy as np
import lockstep as ls
trainer = ls.Trainer(
    lambda w, x: (w + x.mean(), {}), checkpoints=ls.Checkpointer(sys.argv[1])
)
trainer.fit(np.float32(0), [np.ones(8, np.float32)], steps=1)
"""


class TestTheDirectory:
    def test_of_a_run_that_goes_on_is_refused_to_another_process(
        self, tmp_path, mesh_of
    ):
        run = Run(tmp_path, mesh_of(2), every=2)
        for info in run.trainer.steps(run.state, arrays(), steps=4):
            if info.step == 3:
                other = run_python("-c", ELSEWHERE, str(tmp_path))
        assert other.returncode == 1
        assert f"still going on (process {os.getpid()} on " in other.stderr
        assert run.trainer.checkpoints.steps == [2, 4]

    def test_is_free_when_the_run_has_ended_or_failed(self, tmp_path, mesh_of):
        def fail(info):
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            Run(tmp_path, mesh_of(2), callbacks=[fail]).fit(arrays(), steps=4)
        assert run_python("-c", ELSEWHERE, str(tmp_path)).returncode == 0

    def test_that_cannot_be_made_is_refused_before_the_first_step(
        self, tmp_path, mesh_of
    ):
        (tmp_path / "file").touch()
        run = Run(tmp_path / "file" / "run", mesh_of(2))
        with pytest.raises(
            RuntimeError, match="cannot be saved, for .* cannot be made"
        ):
            run.fit(arrays(), steps=4)
        assert run.trainer.step == 0


class TestOtherDevices:
    """Saved on 8 devices after 3 steps of 8 rows."""

    @pytest.mark.parametrize("devices", [4, 2, 1])
    def test_go_on_with_the_same_rows_and_losses(self, tmp_path, mesh_of, devices):
        straight = Run(tmp_path / "a", mesh_of(8)).fit(arrays(), steps=9)
        one = Run(tmp_path / "b", mesh_of(8)).fit(arrays(), steps=3)
        two = Run(tmp_path / "b", mesh_of(devices)).fit(arrays(), steps=6)
        back = Run(tmp_path / "b", mesh_of(8)).fit(arrays(), steps=9)
        assert one.ids + two.ids + back.ids == straight.ids
        got = np.array(one.losses + two.losses + back.losses)
        assert np.allclose(got, straight.losses, rtol=1e-6)
        assert_same(jax.device_get(back.state), jax.device_get(straight.state))

    def test_say_the_plan(self, tmp_path, mesh_of, said):
        Run(tmp_path, mesh_of(8)).fit(arrays(), steps=3)
        Run(tmp_path, mesh_of(2)).fit(arrays(), steps=10)
        assert "saved as global 8 = 8 devices x 1 row; from here on" in said()
        assert (
            "global 8 = 2 devices x 4 rows (was global 8 = 8 devices x 1 row)" in said()
        )
        assert "4 x 1 row a device (was 1 x 1)" in said()
        assert "7 of 10" in said()

    def test_do_not_change_the_batch_in_silence(self, tmp_path, mesh_of):
        whole = Run(tmp_path, mesh_of(8))
        whole.fit(arrays(mesh=mesh_of(8), per_device_batch_size=1), steps=3)
        half = Run(tmp_path, mesh_of(4))
        with pytest.raises(ValueError, match="batches of 8 rows, and these have 4"):
            half.fit(arrays(mesh=mesh_of(4), per_device_batch_size=1), steps=6)
        with pytest.raises(ValueError, match="batches of 8 rows, and these have 16"):
            Run(tmp_path, mesh_of(4)).fit(arrays(global_batch_size=16), steps=6)

    def test_may_change_it_under_a_named_policy(self, tmp_path, mesh_of, said):
        whole = Run(tmp_path, mesh_of(8))
        whole.fit(arrays(mesh=mesh_of(8), per_device_batch_size=1), steps=3)
        half = Run(tmp_path, mesh_of(4), policy="linear-scaling")
        half.fit(arrays(mesh=mesh_of(4), per_device_batch_size=1), steps=5)
        assert [len(ids) for ids in half.ids] == [4, 4]
        assert sorted(sum(whole.ids + half.ids, [])) == sorted(
            np.random.default_rng([0x6F72646572, 1, 0]).permutation(40)[:32].tolist()
        )
        assert "learning rate  x 0.5" in said()

    def test_refuse_lists_of_other_batches(self, tmp_path, mesh_of):
        Run(tmp_path, mesh_of(4)).fit(hosts(8), steps=1)
        with pytest.raises(ValueError, match="batches of 8 rows, and these have 20"):
            Run(tmp_path, mesh_of(4)).fit(hosts(20), steps=3)
        with pytest.raises(ValueError, match="batches of 8 rows, and these have 4"):
            Run(tmp_path, mesh_of(4)).fit(hosts(4), steps=5)
        longer = Run(tmp_path, mesh_of(4), policy=None).fit(hosts(4), steps=5)
        assert len(longer.ids) == 4
