"""`lockstep bench`: the same training by every contender, and honest arithmetic."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench_maker import write_maker
from fresh_process import run_lockstep, run_python

from lockstep.bench import compare, handwritten, report, workload
from lockstep.bench.contender import Contender
from lockstep.bench.timing import Row, take_turns
from lockstep.bench.workload import OwnStep, Workload
from lockstep.parallel import as_parallel
from lockstep.scale import measured as scale
from lockstep.step import make_train_step


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def work_of(rows=16):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
    }
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    return Workload(loss, optax.adam(0.1), params, batch)


class FakeClock:
    """Moves only when a contender runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def contender(name, clock, seconds, runs, ours=False):
    def run(steps):
        runs.append((name, steps))
        clock.now += steps * seconds

    def make():
        clock.now += 1.0
        return Contender(name, run, ours=ours)

    return make


class TestTurns:
    def test_takes_the_time_of_a_step(self):
        clock, runs = FakeClock(), []
        makers = {
            "a": contender("a", clock, 0.01, runs),
            "b": contender("b", clock, 0.05, runs, ours=True),
        }
        a, b = take_turns(makers, turns=4, clock=clock)
        assert (a.median, b.median) == (pytest.approx(10), pytest.approx(50))
        assert (a.first_step_s, b.first_step_s) == (1.01, pytest.approx(1.05))
        assert (a.spread, b.spread, b.ours) == (
            pytest.approx(0),
            pytest.approx(0),
            True,
        )
        # About 0.1 s a turn, after one step that does not count.
        assert runs.count(("a", 10)) == 4 and runs.count(("b", 2)) == 4 + 2

    def test_the_same_refusal_is_said_once(self, caplog):
        clock = FakeClock()

        def refuse():
            raise KeyError("nope")

        makers = {"x": refuse, "y": refuse, "a": contender("a", clock, 0.01, [])}
        rows = take_turns(makers, turns=2, leave_out=True, clock=clock)
        assert [row.name for row in rows] == ["a"]
        [record] = caplog.records
        said = record.getMessage()
        assert said.startswith("x; y are left out: KeyError: 'nope' (test_bench.py:")
        assert said.endswith("in refuse)")
        assert take_turns({"x": refuse, "y": refuse}, turns=2, leave_out=True) == []
        assert "all ways are left out: KeyError: 'nope'" in caplog.text

    def test_orders_change_from_round_to_round(self):
        clock, runs = FakeClock(), []
        makers = {n: contender(n, clock, 0.02, runs) for n in "abc"}
        take_turns(makers, turns=20, clock=clock)
        timed = [name for name, steps in runs if steps == 5]
        rounds = {tuple(timed[i : i + 3]) for i in range(0, 60, 3)}
        assert len(rounds) > 1 and all(set(r) == set("abc") for r in rounds)

    def test_a_refusal_is_left_out_and_said(self, caplog):
        clock = FakeClock()

        def refuse():
            raise ValueError("adafactor cannot be sharded")

        makers = {"x": refuse, "a": contender("a", clock, 0.01, [])}
        rows = take_turns(makers, turns=2, leave_out=True, clock=clock)
        assert [row.name for row in rows] == ["a"]
        assert "x is left out: adafactor cannot be sharded" in caplog.text
        with pytest.raises(ValueError, match="adafactor"):
            take_turns(makers, turns=2, clock=clock)


def test_the_loop_waits_for_every_step():
    class Step:
        waited = 0

        def block_until_ready(self):
            Step.waited += 1

    handwritten.bounded(Step, 5)
    assert Step.waited == 5


class TestContenders:
    def test_hand_written_steps_train_as_lockstep_does(self, mesh_of):
        """What is timed against each other must be the same training."""
        work, mesh = work_of(), mesh_of(4)
        step = as_parallel(make_train_step(loss, work.optimizer), mesh)
        state = step.fn.init(jax.tree.map(jnp.copy, work.params))
        state, _ = step(state, work.batch)
        (params, *_), metrics = handwritten.whole_batch(work)(
            handwritten.start(work), work.batch
        )
        shards = jax.shard_map(
            handwritten.one_shard(work),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
            check_vma=False,
        )
        (sharded, *_), _ = jax.jit(shards)(handwritten.start(work), work.batch)
        for name in params:
            np.testing.assert_allclose(params[name], state.params[name], rtol=1e-6)
            np.testing.assert_allclose(sharded[name], params[name], rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], loss(work.params, work.batch))

    def test_every_contender_trains_on(self, mesh_of):
        for name, make in compare.makers_for(work_of(), mesh_of(2)).items():
            made = make()
            made.run(3)
            assert made.name == name
            made.run(1)

    @pytest.mark.full
    def test_a_loss_that_draws_and_has_a_value_a_row(self, mesh_of, caplog):
        def rows(params, batch, key):
            keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
            return (batch["x"] * keep @ params["w"] + params["b"] - batch["y"]) ** 2

        work = dataclasses.replace(work_of(), loss=rows)
        makers = compare.makers_for(work, mesh_of(2))
        found = take_turns(makers, turns=2)
        assert len(found) == len(makers) and "left out" not in caplog.text
        assert scale.measure(work, turns=2).nbytes == 4 * 6  # 4 numbers, sum and count

    def test_work_that_nothing_can_train(self, mesh_of):
        with pytest.raises(ValueError, match="nothing can train this here"):
            compare.compare(work_of(rows=15), mesh_of(2), turns=2)

    def test_a_step_of_ones_own(self, mesh_of):
        def step(state, batch):
            grads = jax.grad(loss)(state, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {}

        work = work_of()
        own = OwnStep(step, work.params, work.batch)
        rows = compare.compare(own, mesh_of(2), turns=2)
        assert [row.name for row in rows] == ["parallelize"]
        assert "parallelize(step, mesh)" in compare.describe(rows, own, mesh_of(2))

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (lambda state: state, "returned one dict.*return state, {'loss': loss}"),
            (lambda state: (state["w"], state["b"]), "changed the form of its state"),
        ],
    )
    def test_a_step_that_returns_something_else(self, mesh_of, returned, words, caplog):
        work = work_of()
        own = OwnStep(lambda state, batch: returned(state), work.params, work.batch)
        with pytest.raises(ValueError, match="nothing can train this here"):
            compare.compare(own, mesh_of(2), turns=2)
        assert re.search(words, caplog.text)

    @pytest.mark.parametrize(
        ("axis_name", "view"), [(None, "parallelize"), ("data", "per_device")]
    )
    def test_a_train_step_of_ones_own(self, axis_name, view, mesh_of):
        work, mesh = work_of(), mesh_of(2)
        step = make_train_step(loss, work.optimizer, axis_name=axis_name)
        for own in (step, as_parallel(step, mesh)):
            made = workload.read((own, step.init(work.params), work.batch))
            [row] = compare.compare(made, mesh, turns=2)
            assert row.name == view
            assert f"{view}(step, mesh)" in compare.describe([row], made, mesh)


class TestReport:
    ROWS = [
        Row("hand-written jit", False, 1.0, [4.0, 4.0], None),
        Row("train step, device view", True, 2.0, [3.0, 3.0], 2048),
        Row("parallelize", True, 1.0, [5.0, 5.0], 1024),
    ]

    def test_ratios_and_the_best(self):
        table = report.as_table("mlp", self.ROWS, "hand-written jit")
        line = next(x for x in table.splitlines() if x.startswith("train step"))
        assert line.split()[-7:] == "3.000 0% 0.75 2.0 s 2 KiB a device".split()[-7:]
        assert report.best(self.ROWS, ours=True).name == "train step, device view"

    def test_says_what_to_write(self, mesh_of):
        text = compare.describe(self.ROWS, work_of(), mesh_of(2))
        assert (
            "make_train_step(loss, optimizer, axis_name='data', grad_norm=False)"
            in text
        )
        assert "fastest here: train step, device view (3.000 ms a step)" in text
        assert "least memory: parallelize" in text
        assert "fastest of lockstep" not in text and "too small" not in text

    @pytest.mark.parametrize(
        ("name", "devices", "small"),
        [("one device", 2, True), ("one device", 1, False), ("by hand", 2, False)],
    )
    def test_says_if_another_row_is_the_fastest(self, name, devices, small, mesh_of):
        rows = [Row(name, False, 1.0, [1.0, 1.0], None), *self.ROWS]
        text = compare.describe(rows, work_of(), mesh_of(devices))
        assert f"fastest here: {name} (1.000 ms a step)\n" in text
        assert "fastest of lockstep: train step, device view (3.000 ms a step)" in text
        assert ("this work is too small to be split over 2" in text) == small

    def test_files(self, tmp_path):
        tables = {"mlp": self.ROWS, "deep": self.ROWS}
        report.write_json(tmp_path / "out" / "t.json", tables, {"jax": "0"})
        report.draw(tmp_path / "out" / "t.png", tables)
        content = json.loads((tmp_path / "out" / "t.json").read_text())
        assert content["tables"]["deep"][1]["median_ms"] == 3.0
        assert (tmp_path / "out" / "t.png").read_bytes()[1:4] == b"PNG"


class TestMakers:
    def test_unknown_forms_are_explained(self):
        with pytest.raises(ValueError, match="2 values: return"):
            workload.read((1, 2))

    def test_another_order_is_explained(self):
        with pytest.raises(ValueError, match="a function as the optimizer: return"):
            workload.read((optax.sgd(0.1), loss, {}, {}))

    @pytest.mark.parametrize(
        ("where", "words"),
        [
            ("my_step.py", "names no function"),
            ("nowhere.py:make", "no file nowhere"),
            ("json:make", "no 'make' in json"),
        ],
    )
    def test_wrong_places(self, where, words):
        with pytest.raises(ValueError, match=words):
            workload.load(where)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("fails", r"fails failed: RuntimeError: no data \(broken.py:3 in fails\)$"),
            ("asks", "asks is called without arguments: missing.*'rows'"),
            ("number", "number is of type int, and not a function"),
        ],
    )
    def test_errors_of_the_maker(self, name, words, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        script = tmp_path / "broken.py"
        script.write_text(BROKEN)
        with pytest.raises(ValueError, match=words):
            workload.load(f"{script}:{name}")

    def test_errors_of_the_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        script = tmp_path / "broken.py"
        script.write_text("x = 1\n1 / 0\n")
        with pytest.raises(ValueError, match=r"division by zero \(broken.py:2 in"):
            workload.load(f"{script}:make")


BROKEN = """
def fails():
    raise RuntimeError("no data")

def asks(rows):
    pass

number = 3
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("table.py", ("--turns", "0"), "--turns: 0 is below 1"),
        ("table.py", ("--devices", "3"), "--devices: invalid choice"),
        ("table.py", ("--devices", "0"), "--devices: invalid choice"),
        ("two_processes.py", ("--turns", "0"), "--turns: 0 is below 1"),
    ],
)
def test_wrong_options_of_the_benchmarks(script, options, words):
    folder = Path(__file__).parents[1] / "benchmarks"
    done = run_python(str(folder / script), *options)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.full
def test_the_command(tmp_path):
    done = run_lockstep(
        "bench", "--simulate", "2", "--turns", "2", write_maker(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "8 rows on 2 devices" in done.stdout and "fastest here:" in done.stdout
