"""`debug.hang_guard`: what it says when a call does not come back."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh_process import run_lockstep

import lockstep as ls
from lockstep.debug import hang_guard

X = np.ones((16, 3), np.float32)


def on_view(view, fn, mesh):
    if view == "pmap":
        return ls.compat.pmap(fn, "data", devices=list(mesh.devices))
    return ls.parallelize(fn, mesh) if view == "global" else ls.per_device(fn, mesh)


@pytest.mark.parametrize("view", ["global", "device", "pmap"])
def test_a_call_that_does_not_come_back_is_named(view, mesh_of):
    texts, free = queue.Queue(), threading.Event()

    def step(w, x):
        free.wait(60)  # as a data source, a lock or a compile that does not end
        return {"total": x.sum()}

    def say(text):
        texts.put(text)
        free.set()

    w, x = (np.zeros(2), X.reshape(2, 8, 3)) if view == "pmap" else (0.0, X)
    with hang_guard(0.2, show=say):
        on_view(view, step, mesh_of(2))(w, x)
    text = texts.get_nowait()
    assert "(process 0 of 1)" in text and "nothing moved for" in text
    assert "step, call 1: not back yet" in text


def test_the_devices_that_owe_a_result_are_named(mesh_of):
    texts, free = queue.Queue(), threading.Event()

    def wait(x):
        free.wait(60)
        return x

    def step(w, x):
        return w + jax.pure_callback(wait, jax.ShapeDtypeStruct((), "f"), x.sum()), 1.0

    with hang_guard(0.2, show=texts.put):
        run = ls.parallelize(step, mesh_of(1))
        thread = threading.Thread(target=run, args=(jnp.float32(0), X))
        thread.start()
        text = texts.get(timeout=60)
        free.set()
        thread.join()
    assert "step, call 1: not back yet" in text


def test_between_two_steps(mesh_of):
    texts = queue.Queue()
    with hang_guard(0.2, show=texts.put):
        run = ls.parallelize(lambda w, x: (w + x.sum(), None), mesh_of(2))
        w, _ = run(0.0, X)
        texts.queue.clear()
        jax.block_until_ready(w)
        run(w, X)
        text = texts.get(timeout=60)  # nobody calls the step any more
    assert "<lambda>, call 2: handed to the devices" in text
    assert "what was handed to the devices before is done" in text
    assert texts.empty()  # said once


def test_steps_that_move_are_left_alone(mesh_of):
    texts = []
    with hang_guard(60, show=texts.append):
        run = ls.parallelize(lambda w, x: (w + x.sum(), None), mesh_of(2))
        w, _ = run(0.0, X)
        run(w, X)
    assert not texts


def test_the_time_is_above_0():
    with pytest.raises(ValueError, match="timeout_s=0; it is above 0"):
        with hang_guard(0):
            pass


def test_the_command_prints_the_lines_of_all_threads(tmp_path):
    (tmp_path / "train.py").write_text(
        "import threading, numpy as np, lockstep as ls\n"
        "def train_step(w, x):\n"
        "    threading.Event().wait(1)\n"
        "    return w + x.sum(), None\n"
        "ls.parallelize(train_step)(0.0, np.ones(8))\n"
    )
    done = run_lockstep("run", "--hang-timeout", "0.2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train_step, call 1: not back yet" in done.stderr
    assert 'train.py", line 3 in train_step' in done.stderr
