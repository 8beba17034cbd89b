"""Callbacks: right means, late reads, and results that find their way."""

import builtins
import gc
import io
import json
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep as ls
from lockstep import notices
from lockstep.callbacks import (
    CheckReplicas,
    Evaluate,
    Log,
    Plot,
    Profile,
    Progress,
    StopEarly,
    StopOnNonFinite,
    every,
)
from lockstep.callbacks.interval import MOST_HELD
from lockstep.loop import StepInfo, Trainer


class Lines:
    """A writer that keeps what it gets, and a clock does not disturb."""

    speed = ("examples_per_second", "seconds_per_step")

    def __init__(self):
        self.lines, self.closed = [], 0

    def write(self, step, scalars):
        self.lines.append((step, dict(scalars)))

    def close(self):
        self.closed += 1

    @property
    def metrics(self):
        return [
            (step, {k: v for k, v in scalars.items() if k not in self.speed})
            for step, scalars in self.lines
        ]


def info_of(step, metrics=None, *, rows=8, seconds=1.0, compiled=False, trainer=None):
    trainer = trainer or SimpleNamespace(step=step, state=None)
    stands_in: Any = trainer
    call = range(step, step + 1)
    metrics = metrics or {}
    shown = call, [metrics]
    return StepInfo(step, 1, metrics, rows, seconds, compiled, *shown, stands_in)


def show(callback, infos, trainer=None):
    """What the loop does with one callback; the steps after which it wants to stop."""
    trainer = trainer or SimpleNamespace(step=0, total=len(infos), mesh=None)
    method = lambda name: getattr(callback, name, lambda *args: None)  # noqa: E731
    stops = []
    method("start")(trainer, None)
    for info in infos:
        method("observe")(info)
        if callback(info):
            stops.append(info.step)
    method("finish")(infos[-1])
    method("close")()
    return stops


def counting(state, batch):
    """A step whose metrics are known: the number of the step, and the mean row."""
    return state + 1, {"n": state + 1, "mean": ls.Mean.of(batch)}


def batches_of(*sizes):
    return [np.full(n, n, np.float32) for n in sizes]


@pytest.fixture
def said(caplog):
    notices.reset()
    caplog.set_level(logging.INFO, logger="lockstep")
    yield lambda: [record.getMessage() for record in caplog.records]
    notices.reset()


@pytest.fixture
def fetches(monkeypatch):
    """Counts how often metrics are brought to the host."""
    calls = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(1) or real(x))
    return calls


class TestEvery:
    def test_calls_at_multiples_and_forwards_the_rest(self):
        events = []

        class Inner:
            def start(self, trainer, state):
                events.append("start")

            def observe(self, info):
                events.append(f"observe {info.step}")

            def __call__(self, info):
                events.append(f"call {info.step}")

            def close(self):
                events.append("close")

        show(every(2, Inner()), [info_of(step) for step in (1, 2, 3, 4)])
        assert events == [
            *("start", "observe 1", "observe 2", "call 2"),
            *("observe 3", "observe 4", "call 4", "close"),
        ]

    def test_hands_on_the_wish_to_stop(self):
        infos = [info_of(step) for step in (1, 2, 3)]
        assert show(every(3, lambda info: True), infos) == [3]

    def test_names_what_it_wraps(self):
        def spoil(info):
            raise ValueError("planted")

        trainer = Trainer(counting, callbacks=[every(2, spoil)])
        with pytest.raises(ValueError, match="planted") as error:
            trainer.fit(0, batches_of(8, 8))
        assert error.value.__notes__ == ["in every(2, spoil) at step 2"]

    @pytest.mark.parametrize("n", [0, -1, 1.5, True, "epoch"])
    def test_needs_a_number_of_steps(self, n):
        with pytest.raises(ValueError, match="number of steps, at least 1"):
            every(n, print)

    def test_needs_something_to_call(self):
        with pytest.raises(TypeError, match=r"every\(2, ...\) is a str"):
            every(2, "log")  # pyright: ignore[reportArgumentType]


class TestLog:
    def test_means_are_merged_and_numbers_weighted_by_rows(self):
        lines = Lines()
        trainer = Trainer(counting, callbacks=[every(2, Log(lines))])
        trainer.fit(0, batches_of(8, 24, 8, 8, 16))
        assert lines.metrics == [
            (2, {"n": (1 * 8 + 2 * 24) / 32, "mean": (8 * 8 + 24 * 24) / 32}),
            (4, {"n": 3.5, "mean": 8.0}),
            (5, {"n": 5.0, "mean": 16.0}),
        ]

    def test_sums_are_made_in_float64(self):
        lines = Lines()
        values = [1e8, 1.0, 1.0, 1.0]
        infos = [
            info_of(i + 1, {"x": jnp.float32(v), "m": ls.Mean(jnp.float32(v), 1)})
            for i, v in enumerate(values)
        ]
        show(every(4, Log(lines)), infos)
        assert lines.metrics == [(4, {"x": (1e8 + 3) / 4, "m": (1e8 + 3) / 4})]

    def test_nested_names_are_joined(self):
        lines = Lines()
        show(Log(lines), [info_of(1, {"top": {"1": jnp.float32(0.5)}})])
        assert lines.metrics == [(1, {"top/1": 0.5})]

    def test_a_hundred_steps_with_a_line_every_50_fetch_twice(self, fetches):
        lines = Lines()
        trainer = Trainer(counting, callbacks=[every(50, Log(lines))])
        at = {
            info.step: len(fetches)
            for info in trainer.steps(0, batches_of(8), steps=100)
        }
        assert [step for step, _ in lines.lines] == [50, 100]
        assert len(fetches) == 2
        # Late enough for the devices to be done, and then without delay.
        assert (at[51], at[52], at[100]) == (0, 1, 1)

    @staticmethod
    def most_arrays(trainer, steps):
        """The greatest number of arrays on the devices after any of the steps."""

        def alive():
            return sum(len(x.sharding.device_set) > 1 for x in jax.live_arrays())

        gc.collect()
        before = alive()
        infos = trainer.steps(0, batches_of(8), steps=steps)
        return max(alive() - before for _ in infos)

    def test_metrics_do_not_pile_up_on_the_devices(self):
        step = lambda n, x: (n, {"a": x.sum(), "b": x[0]})  # noqa: E731
        trainer = Trainer(step, callbacks=[every(20, Log(Lines()))])
        most = self.most_arrays(trainer, steps=70)
        assert 40 <= most <= 2 * (20 + 2) + 5  # 2 metrics a step, and the loop's own

    def test_nor_in_an_interval_that_never_ends(self):
        step = lambda n, x: (n, {"a": x.sum()})  # noqa: E731
        lines = Lines()
        trainer = Trainer(step, callbacks=[every(10**6, Log(lines))])
        most = self.most_arrays(trainer, steps=3 * MOST_HELD)
        assert MOST_HELD <= most <= MOST_HELD + 5
        assert lines.metrics == [(3 * MOST_HELD, {"a": 64.0})]

    def test_speed_is_told_without_the_steps_that_compiled(self):
        lines = Lines()
        infos = [
            info_of(1, rows=8, seconds=60.0, compiled=True),
            info_of(2, rows=8, seconds=0.5),
            info_of(3, rows=24, seconds=1.5),
        ]
        show(every(3, Log(lines)), infos)
        assert lines.lines == [
            (3, {"examples_per_second": 16.0, "seconds_per_step": 1.0})
        ]

    def test_results_of_later_callbacks_are_written_under_their_step(self):
        lines = Lines()
        found = lambda info: info.results.update(found=info.step / 2)  # noqa: E731
        callbacks = [every(2, Log(lines)), every(3, found)]
        Trainer(counting, callbacks=callbacks).fit(0, batches_of(8), steps=6)
        assert [line for line in lines.lines if "found" in line[1]] == [
            (3, {"found": 1.5}),
            (6, {"found": 3.0}),
        ]
        steps = [step for step, _ in lines.lines]
        assert steps == sorted(steps)

    def test_a_metric_that_is_no_number_is_refused_at_the_first_step(self):
        for bad in (jnp.ones(3), None, "good", jax.random.key(0)):
            with pytest.raises(ValueError, match="metric 'all' is"):
                show(every(100, Log(Lines())), [info_of(1, {"all": bad})])
        with pytest.raises(ValueError, match="metric 'm' is float32 of shape \\(2,\\)"):
            show(Log(Lines()), [info_of(1, {"m": ls.Mean(jnp.ones(2), 1)})])
        show(Log(Lines()), [info_of(1, {"flag": jnp.bool_(True), "n": 1})])

    def test_metrics_that_change_their_names_are_refused(self):
        infos = [info_of(1, {"a": 1.0}), info_of(2, {"b": 1.0})]
        with pytest.raises(ValueError, match="the metrics changed"):
            show(every(2, Log(Lines())), infos)

    def test_after_a_failure_everything_is_on_disk(self, tmp_path):
        path = tmp_path / "m.jsonl"

        def spoil(info):
            raise ValueError("planted")

        log = every(2, Log(ls.writers.JsonLines(path)))
        trainer = Trainer(counting, callbacks=[log, every(5, spoil)])
        with pytest.raises(ValueError, match="planted"):
            trainer.fit(0, batches_of(8), steps=9)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["step"], line["n"]) for line in lines] == [
            (2, 1.5),
            (4, 3.5),
            (5, 5.0),
        ]

    def test_a_bad_path_fails_before_the_training(self, tmp_path):
        ran = []
        step = lambda n, x: (ran.append(1), (n, {}))[1]  # noqa: E731
        log = every(100, Log(ls.writers.JsonLines(tmp_path)))
        with pytest.raises(IsADirectoryError):
            Trainer(step, callbacks=[log]).fit(0, batches_of(8))
        assert not ran

    def test_writers_are_closed_and_serve_a_second_run(self, tmp_path):
        path, lines = tmp_path / "m.jsonl", Lines()
        log = Log(lines, ls.writers.JsonLines(path))
        trainer = Trainer(counting, callbacks=[log])
        state = trainer.fit(0, batches_of(8, 8))
        trainer.fit(state, batches_of(8, 8))
        assert lines.closed == 2
        assert [step for step, _ in lines.lines] == [1, 2, 3, 4]
        assert len(path.read_text().splitlines()) == 4

    def test_other_processes_write_nothing(self, monkeypatch, fetches):
        monkeypatch.setattr("lockstep.callbacks.log.is_main_process", lambda: False)
        lines = Lines()
        Trainer(counting, callbacks=[Log(lines)]).fit(0, batches_of(8, 8))
        assert lines.lines == [] and lines.closed == 0 and not fetches

    def test_writes_to_the_console_if_nothing_is_said(self, capsys):
        show(Log(), [info_of(1, {"loss": jnp.float32(0.5)}, compiled=True)])
        assert capsys.readouterr().out == "step 1: loss 0.5\n"

    def test_a_path_is_no_writer(self):
        with pytest.raises(TypeError, match="writers.JsonLines"):
            Log("metrics.jsonl")  # pyright: ignore[reportArgumentType]


class TestEvaluate:
    @staticmethod
    def error(state, batch):
        return {"error": abs(batch - state)}

    def test_puts_exact_results_where_others_see_them(self, mesh_of):
        lines = Lines()
        rows = np.arange(11, dtype=np.float32)
        valid = Evaluate(self.error, [rows[:8], rows[8:]])
        callbacks = [every(2, valid), Log(lines)]
        trainer = Trainer(counting, mesh=mesh_of(8), callbacks=callbacks)
        trainer.fit(0, batches_of(8, 8, 8))
        want = sum(abs(i - 2) for i in range(11)) / 11
        results = [line for line in lines.lines if "valid/error" in line[1]]
        assert results == [(2, {"valid/error": pytest.approx(want, rel=1e-6)})]

    def test_compiles_once_and_leaves_the_training_alone(self):
        traced = []

        def error(state, batch):
            traced.append(1)
            return {"error": abs(batch - state)}

        valid = Evaluate(error, batches_of(8), name="test")
        trainer = Trainer(counting, callbacks=[valid], max_compiles=1)
        results = [dict(i.results) for i in trainer.steps(0, batches_of(8), steps=4)]
        assert results == [{"test/error": 8.0 - n} for n in (1, 2, 3, 4)]
        assert trainer.state == 4
        assert len(traced) == 1

    def test_an_iterator_would_be_empty_the_second_time(self):
        with pytest.raises(TypeError, match="list_iterator is used up after one"):
            Evaluate(self.error, iter(batches_of(8)))


class TestStopEarly:
    @staticmethod
    def stops(callback, values, name="valid/x"):
        infos = [info_of(i + 1) for i in range(len(values))]
        for info, value in zip(infos, values, strict=True):
            if value is not None:
                info.results[name] = value
        return show(callback, infos)

    @pytest.mark.parametrize(
        ("mode", "values", "stops"),
        [
            ("max", [1, 2, 1, 1, 3, 3, 3], [4, 7]),
            ("min", [3, 2, 2, None, 2, 1, 1], [5]),
            ("max", [float("nan")] * 2, [2]),
            ("min", [1, float("nan"), 0.5, float("inf"), 0.5], [5]),
        ],
    )
    def test_stops_without_progress(self, mode, values, stops):
        callback = StopEarly("valid/x", patience=2, mode=mode)
        assert self.stops(callback, values)[: len(stops)] == stops

    def test_small_gains_may_count_as_none(self):
        callback = StopEarly("valid/x", patience=2, mode="max", min_delta=0.1)
        assert self.stops(callback, [1.0, 1.05, 1.09, 2.0]) == [3]

    def test_ends_a_training_and_says_why(self, said):
        valid = Evaluate(lambda n, x: {"gain": jnp.minimum(n, 4.0)}, batches_of(8))
        stop = StopEarly("valid/gain", patience=3, mode="max")
        trainer = Trainer(counting, callbacks=[valid, stop])
        trainer.fit(0, batches_of(8), steps=100)
        assert trainer.step == 7
        assert (stop.best, stop.best_step) == (4.0, 4)
        assert any("step 7: valid/gain is 4" in text for text in said())

    def test_a_misspelt_name_is_an_error_at_once(self):
        with pytest.raises(ValueError, match="'valid/x'.*not among.*valid/xx"):
            self.stops(StopEarly("valid/x", patience=1, mode="max"), [1], "valid/xx")

    def test_results_of_others_are_none_of_its_business(self, said):
        callback = StopEarly("valid/x", patience=1, mode="max")
        assert self.stops(callback, [1, 2], "test/x") == []
        assert any("never saw 'valid/x' (results: test/x)" in t for t in said())

    @pytest.mark.parametrize("bad", [{"mode": "up"}, {"patience": 0}])
    def test_bad_arguments(self, bad):
        with pytest.raises(ValueError, match=next(iter(bad))):
            StopEarly("x", **({"mode": "max", "patience": 1} | bad))


class TestStopOnNonFinite:
    @staticmethod
    def infos(bad_step, bad, count=9):
        values = [bad if i + 1 == bad_step else 1.0 for i in range(count)]
        return [
            info_of(i + 1, {"n": jnp.int32(i), "m": ls.Mean(jnp.float32(v), 1)})
            for i, v in enumerate(values)
        ]

    @pytest.mark.parametrize(("bad", "step"), [(np.nan, 2), (-np.inf, 9), (np.inf, 1)])
    def test_names_the_step_the_metric_and_the_value(self, bad, step):
        with pytest.raises(
            FloatingPointError, match=f"m/total' is {bad} at step {step}"
        ):
            show(StopOnNonFinite(steps=3), self.infos(step, bad))

    def test_is_silent_about_good_ones(self):
        assert show(StopOnNonFinite(steps=2), self.infos(0, 0.0)) == []

    def test_reads_blocks_and_only_what_is_done(self, fetches):
        callback, infos = StopOnNonFinite(steps=4), self.infos(2, np.nan)
        callback.start(None, None)
        for info in infos[:5]:
            callback.observe(info)
        assert not fetches
        with pytest.raises(FloatingPointError, match="step 2"):
            callback.observe(infos[5])
        assert len(fetches) == 1

    def test_ends_a_training_and_leaves_its_state(self):
        def blow_up(w, x):
            return w * 10, {"loss": w * 10}

        trainer = Trainer(blow_up, callbacks=[StopOnNonFinite(steps=1)])
        with pytest.raises(FloatingPointError, match="inf at step 39"):
            trainer.fit(1.0, batches_of(8), steps=100)
        assert trainer.step == 41
        assert np.isinf(trainer.state)

    def test_needs_at_least_one_step(self):
        with pytest.raises(ValueError, match="steps=0"):
            StopOnNonFinite(steps=0)


class TestCheckReplicas:
    def test_passes_equal_ones_and_names_the_leaf_that_differs(self, mesh_of):
        mesh = mesh_of(4)
        parts = [jax.device_put(np.ones(3), device) for device in mesh.devices.flat]
        where = ls.sharding.replicated(mesh)
        join = jax.make_array_from_single_device_arrays
        good = {"w": join((3,), where, parts)}
        show(CheckReplicas(), [info_of(1, trainer=SimpleNamespace(step=1, state=good))])
        parts[2] = parts[2].at[1].add(1.0)
        bad = {"w": join((3,), where, parts)}
        with pytest.raises(ls.debug.ReplicaMismatch, match=r"state\['w'\]"):
            show(
                CheckReplicas(),
                [info_of(1, trainer=SimpleNamespace(step=1, state=bad))],
            )


class TestProfile:
    @pytest.fixture
    def traces(self, monkeypatch):
        events = []
        started = lambda path: events.append(f"start {path}")  # noqa: E731
        monkeypatch.setattr(jax.profiler, "start_trace", started)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
        return events

    @pytest.mark.parametrize(
        ("start", "steps", "total"), [(1, 2, 5), (3, 2, 5), (4, 9, 5)]
    )
    def test_holds_the_steps_that_were_asked_for(self, traces, start, steps, total):
        marks = []
        spy = lambda info: marks.append((info.step, list(traces)))  # noqa: E731
        profile = Profile("run/profile", start=start, steps=steps)
        trainer = Trainer(counting, callbacks=[spy, profile])
        trainer.fit(0, batches_of(8), steps=total)
        recorded = [step for step, events in marks if events == ["start run/profile"]]
        assert recorded == list(range(start, min(start + steps, total + 1)))
        assert traces == ["start run/profile", "stop"]

    def test_ends_the_trace_when_the_training_fails(self, traces):
        def spoil(info):
            raise ValueError("planted")

        callbacks = [Profile("p", start=1, steps=9), spoil]
        with pytest.raises(ValueError, match="planted"):
            Trainer(counting, callbacks=callbacks).fit(0, batches_of(8))
        assert traces == ["start p", "stop"]

    def test_other_processes_record_nothing(self, traces, monkeypatch):
        monkeypatch.setattr("lockstep.callbacks.watch.is_main_process", lambda: False)
        trainer = Trainer(counting, callbacks=[Profile("p", start=1)])
        trainer.fit(0, batches_of(8))
        assert traces == []

    def test_writes_a_trace_that_can_be_opened(self, tmp_path):
        profile = Profile(tmp_path, start=2, steps=1)
        Trainer(counting, callbacks=[profile]).fit(0, batches_of(8), steps=3)
        assert list(tmp_path.rglob("*.xplane.pb"))

    @pytest.mark.parametrize("bad", [{"start": 0}, {"steps": 0}])
    def test_bad_arguments(self, bad):
        with pytest.raises(ValueError, match="at least 1"):
            Profile("p", **bad)


class TestPlot:
    def test_draws_the_means_and_the_results(self, tmp_path):
        path = tmp_path / "run" / "loss.png"
        plot = Plot(path)
        found = lambda info: info.results.update({"valid/n": 7.0})  # noqa: E731
        trainer = Trainer(counting, callbacks=[every(2, plot), every(3, found)])
        trainer.fit(0, batches_of(8), steps=4)
        picture: Any = plot._writers[0]
        assert picture.curves == {
            "n": ([2, 4], [1.5, 3.5]),
            "mean": ([2, 4], [8.0, 8.0]),
            "valid/n": ([3], [7.0]),
        }
        import matplotlib.image

        pixels = matplotlib.image.imread(path)
        assert pixels.shape[1] > pixels.shape[0] > 100  # two panels beside each other
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10

    def test_asks_for_matplotlib_before_the_training(self, tmp_path, monkeypatch):
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ImportError, match=r"pip install 'lockstep-jax\[plot\]'"):
            Plot(tmp_path / "x.png").start(None, None)

    def test_a_folder_is_no_picture(self, tmp_path):
        with pytest.raises(IsADirectoryError, match="folder.*loss.png"):
            Plot(tmp_path).start(None, None)


class Clock:
    """Goes on by what it is told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class TestProgress:
    @staticmethod
    def run(console, seconds, steps=6, **options):
        """The training takes `seconds` a step, by its clock and by the display's."""
        clock = Clock()

        def tick(info):
            clock.now += seconds
            info.results.update({"valid/n": float(info.step)} if info.step == 4 else {})

        progress = Progress(console=console, clock=clock, **options)
        trainer = Trainer(counting, callbacks=[tick, progress], clock=clock)
        trainer.fit(0, batches_of(8, 8), steps=steps)

    @staticmethod
    def console(**options) -> Any:
        from rich.console import Console

        return Console(file=io.StringIO(), width=120, **options)

    def test_prints_lines_where_there_is_no_terminal(self):
        console = self.console(force_terminal=False)
        self.run(console, seconds=4.0, lines_s=7.0)
        assert console.file.getvalue().splitlines() == [
            "step 5/6 (epoch 3): mean 8, n 2, valid/n 4, 2 examples/s",
            "step 6/6 (epoch 3): mean 8, n 6, valid/n 4, 2 examples/s",
        ]

    def test_draws_a_bar_in_a_terminal(self):
        console = self.console(force_terminal=True)
        self.run(console, seconds=4.0, refresh_s=1.0)
        text = console.file.getvalue()
        assert "compiling" in text
        assert "6/6" in text
        assert "epoch 3" in text
        assert "valid/n 4, 2 examples/s" in text
        assert text.count("\n") == 1  # drawn in place, and left behind at the end

    def test_replaces_one_line_in_a_notebook(self, monkeypatch):
        shown = []

        class Handle:
            def update(self, data, raw):
                shown.append(data["text/plain"])

        def display(data, raw, display_id):
            Handle().update(data, raw)
            return Handle()

        monkeypatch.setattr("IPython.display.display", display)
        self.run(self.console(force_jupyter=True), seconds=4.0, refresh_s=1.0)
        assert shown[0] == f"compiling {'╌' * 12} 0/6"
        assert shown[1] == f"epoch 2 {'━' * 8}{'╌' * 4} 4/6 mean 8, n 1.5, 2 examples/s"
        assert shown[-1].startswith(f"epoch 3 {'━' * 12} 6/6 mean 8, n 6")

    def test_an_unknown_number_of_steps_is_shown_as_such(self):
        console = self.console(force_terminal=False)
        progress = Progress(console=console)
        trainer = Trainer(counting, callbacks=[progress])
        trainer.fit(0, iter(batches_of(8, 8)))
        assert "step 2 (epoch 1): mean 8, n 1.5" in console.file.getvalue()

    def test_reads_no_more_often_than_it_refreshes(self, fetches):
        console = self.console(force_terminal=True)
        self.run(console, seconds=0.01, steps=50, refresh_s=0.25)
        assert len(fetches) == 2  # after 26 steps, and the rest at the end

    def test_other_processes_show_nothing(self, monkeypatch, fetches):
        monkeypatch.setattr(
            "lockstep.callbacks.progress.is_main_process", lambda: False
        )
        console = self.console(force_terminal=True)
        self.run(console, seconds=1.0)
        assert console.file.getvalue() == ""
        assert not fetches
