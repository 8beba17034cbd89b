"""Signals: a run that is asked to stop saves first, and goes on where it stood."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import lockstep as ls
from lockstep.preemption import Preempted, StopSignals

SOURCE = Path(__file__).parents[1] / "src"
BATCHES = [np.full(8, float(i), np.float32) for i in range(6)]


def step(state, batch):
    return state + batch.mean(), {"loss": batch.mean()}


def handlers():
    return [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]


def at(number, name=signal.SIGTERM):
    """A callback that sends this process a signal after one step."""

    def send(info):
        if info.step == number:
            signal.raise_signal(name)

    return send


def trainer(directory, *callbacks, every=100):
    checkpoints = ls.Checkpointer(directory, every=every)
    return ls.Trainer(step, callbacks=callbacks, checkpoints=checkpoints)


class TestAsked:
    def test_names_the_signal_and_leaves_the_handlers_as_they_were(self):
        before = handlers()
        with StopSignals() as signals:
            assert signals.asked(1) is None
            signal.raise_signal(signal.SIGTERM)
            assert signals.asked(1) == "SIGTERM"
        assert handlers() == before

    def test_twice_stops_at_once(self):
        before = handlers()
        with pytest.raises(KeyboardInterrupt), StopSignals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert handlers() == before

    def test_sigterm_twice_is_one_request(self):
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert signals.asked(1) == "SIGTERM"

    def test_changes_nothing_outside_of_the_main_thread(self):
        before, seen = handlers(), []

        def look():
            with StopSignals():
                seen.append(handlers())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == [before]


class TestARun:
    @pytest.mark.parametrize(
        ("name", "error", "code"),
        [(signal.SIGTERM, Preempted, 75), (signal.SIGINT, KeyboardInterrupt, None)],
    )
    def test_saves_at_the_step_and_goes_on_after_it(self, tmp_path, name, error, code):
        before = handlers()
        with pytest.raises(error, match=f"ended after step 3 .*{tmp_path}/3") as raised:
            trainer(tmp_path, at(3, name)).fit(0.0, BATCHES)
        assert getattr(raised.value, "code", None) == code
        assert handlers() == before
        two = trainer(tmp_path)
        assert float(two.fit(0.0, BATCHES)) == 15.0
        assert two.step == 6

    def test_finishes_its_callbacks(self, tmp_path):
        events = []

        class Note:
            def __call__(self, info):
                events.append(info.step)

            def finish(self, info):
                events.append("finish")

        with pytest.raises(Preempted):
            trainer(tmp_path, at(2), Note()).fit(0.0, BATCHES)
        assert events == [1, 2, "finish"]

    def test_may_be_asked_while_it_saves(self, tmp_path):
        run = trainer(tmp_path, every=2)
        save = run.checkpoints.write

        def interrupted_save(*args):
            signal.raise_signal(signal.SIGTERM)
            save(*args)

        run.checkpoints.write = interrupted_save
        with pytest.raises(Preempted, match="after step 2"):
            run.fit(0.0, BATCHES)
        assert run.checkpoints.steps == [2]

    def test_may_be_asked_while_it_compiles(self, tmp_path):
        def traced(state, batch):
            signal.raise_signal(signal.SIGTERM)
            return step(state, batch)

        checkpoints = ls.Checkpointer(tmp_path)
        run = ls.Trainer(traced, checkpoints=checkpoints)
        with pytest.raises(Preempted, match="after step 1"):
            run.fit(0.0, BATCHES)
        assert checkpoints.steps == [1]

    def test_may_be_asked_in_the_body_of_the_loop(self, tmp_path):
        run, seen = trainer(tmp_path), []
        with pytest.raises(Preempted, match="after step 2"):
            for info in run.steps(0.0, BATCHES):
                seen.append(info.step)
                if info.step == 2:
                    signal.raise_signal(signal.SIGTERM)
        assert seen == [1, 2]

    def test_may_be_asked_in_a_body_that_leaves_the_loop(self, tmp_path):
        run = trainer(tmp_path)
        infos = run.steps(0.0, BATCHES)
        next(infos)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="after step 1"):
            infos.close()
        assert run.checkpoints.steps == [1]

    def test_may_be_asked_before_its_first_step(self, tmp_path):
        class Start:
            def start(self, trainer, state):
                signal.raise_signal(signal.SIGTERM)

            def __call__(self, info):
                pass

        run = trainer(tmp_path, Start())
        with pytest.raises(Preempted, match="after step 1"):
            run.fit(0.0, BATCHES)

    def test_without_checkpoints_leaves_the_signals_alone(self):
        before, seen = handlers(), []
        ls.Trainer(step, callbacks=[lambda info: seen.append(handlers())]).fit(
            0.0, BATCHES[:1]
        )
        assert seen == [before]


SCRIPT = """
import sys, numpy as np, lockstep as ls

def step(state, batch):
    return state + batch.mean(), {"loss": batch.mean()}

def show(info):
    print(info.step, flush=True)
    sys.stdin.readline()

trainer = ls.Trainer(step, callbacks=[show], checkpoints=ls.Checkpointer(sys.argv[1]))
trainer.fit(0.0, [np.ones(8, np.float32)] * 9)
"""


@pytest.mark.parametrize(
    ("name", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_process_ends_with_the_code_for_it(tmp_path, name, code):
    """75 asks a scheduler to start it again; SIGINT ends it as it ends any Python."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(name)
    out, error = process.communicate("\n" * 9, timeout=120)
    assert process.returncode == code, error
    (step,) = ls.Checkpointer(tmp_path).steps
    assert f"{name.name}: the run ended after step {step} and is saved in" in error
    assert step < 9, out
