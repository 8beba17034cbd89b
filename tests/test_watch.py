"""`lockstep run --watch` and `lockstep replay`: scripts seen from outside."""

import re

import pytest
from fresh_process import run_lockstep
from typer.testing import CliRunner

from lockstep.cli import app

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, lockstep as ls

fault = sys.argv[1]

def loss_of(w, x):
    return jnp.log(x * w).mean() ** 2

def train_step(w, x):
    loss, grad = jax.value_and_grad(loss_of)(w, x)
    {average}
    if fault == "drift":
        w = w + 1e-3 * jax.lax.axis_index("data")
    return w - 0.01 * grad, loss

{wrap}
w = {state}
for i in range(30):
    rows = 6 if (fault, i) == ("faults", 29) else 8
    x = np.linspace(1, 2, rows, dtype=np.float32){shape}
    if (fault, i) == ("faults", 26):
        x.reshape(-1)[5] = -1
    if fault == "none":
        x = {place}
    w, loss = step(w, x)
print("trained", *sys.argv[1:])
"""

VIEWS = {
    "global": {
        "average": "",
        "wrap": "step = ls.parallelize(train_step)",
        "state": "1.5",
        "shape": "",
        "place": "step.place_batch(x)",
    },
    "device": {
        "average": "grad, loss = jax.lax.pmean((grad, loss), 'data')",
        "wrap": "step = ls.per_device(train_step)",
        "state": "1.5",
        "shape": "",
        "place": "step.place_batch(x)",
    },
    "pmap": {
        "average": "grad, loss = jax.lax.pmean((grad, loss), 'data')",
        "wrap": "step = ls.compat.pmap(train_step, 'data')",
        "state": "np.full(2, 1.5, np.float32)",
        "shape": ".reshape(2, -1)",
        "place": "ls.compat.device_put_sharded(list(x), jax.devices())",
    },
}


def watch(folder, view, fault):
    (folder / "train.py").write_text(SCRIPT.format(**VIEWS[view]))
    options = ("--simulate", "2", "--watch", "--watch-every", "10")
    return run_lockstep("run", *options, "train.py", fault, cwd=folder)


def lines(result):
    return [line for line in result.stdout.splitlines() if "lockstep watch: " in line]


@pytest.mark.parametrize(
    "view",
    ["global", *(pytest.param(v, marks=pytest.mark.full) for v in ("device", "pmap"))],
)
class TestWatch:
    def test_a_healthy_script_is_summed_up(self, tmp_path, view):
        result = watch(tmp_path, view, "none")
        assert result.returncode == 0, result.stderr
        assert "trained none" in result.stdout
        assert "all-reduce" in result.stdout
        compiled = [line for line in lines(result) if ": compiled in" in line]
        assert len(compiled) == 1 and compiled[0].endswith("first call")
        assert re.fullmatch(
            r"lockstep watch: train_step: 30 calls, compiled 1 x in \S+ s, numbers "
            r"finite, copies of the state equal in 3 checks",
            lines(result)[-1],
        )
        assert result.stderr == "" and "in every call" not in result.stdout

    def test_faults_are_told_and_the_bad_step_is_replayed(self, tmp_path, view):
        result = watch(tmp_path, view, "faults")
        stacked = view == "pmap"
        row = "1" if stacked else "5"
        assert "trained faults" in result.stdout
        assert "train_step is not finite at step 27" in result.stdout
        assert f"device 1 (process 0), batch row {row}: makes it" in result.stdout
        assert "train.py:8 in loss_of" in result.stdout
        assert "numbers NOT FINITE" in lines(result)[-1]
        change = r"\[2,4\] -> float32\[2,3\]" if stacked else r"\[8\] -> float32\[6\]"
        assert "train_step, call 2: x (float32[" in result.stdout
        assert "comes from the host in every call" in result.stdout
        compiled = rf"train_step, call 30: compiled in \S+ s: x float32{change}"
        assert re.search(compiled, result.stdout)
        assert "compiling again" in result.stderr

        again = run_lockstep("replay", str(tmp_path / "run/nan_step_27"))
        assert again.returncode == 1, again.stderr
        assert f"device 1 (process 0), batch row {row}: makes it" in again.stdout
        assert "nan made by `log` at train.py:8 in loss_of" in again.stdout
        assert "trained" not in again.stdout


@pytest.mark.full
def test_a_repair_is_seen_by_the_replay(tmp_path):
    watch(tmp_path, "global", "faults")
    source = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(source.replace("x * w", "jnp.abs(x) * w"))
    healed = run_lockstep("replay", "run/nan_step_27", cwd=tmp_path)
    assert healed.returncode == 0, healed.stderr
    assert "train_step: all is finite at step 27" in healed.stdout
    (tmp_path / "train.py").write_text("print('other')")
    other = run_lockstep("replay", "run/nan_step_27", cwd=tmp_path)
    assert other.returncode == 2 and "without a step train_step" in other.stderr


def test_copies_that_differ_are_told_once(tmp_path):
    """Of `per_device` the step itself tells, after its first call."""
    result = watch(tmp_path, "pmap", "drift")
    told = [line for line in lines(result) if "differ from" in line]
    assert len(told) == 1
    assert "train_step, call 10: state: device 1 differ from 0" in told[0]
    assert "copies of the state differ" in lines(result)[-1]


class TestReplayRefuses:
    def test_a_folder_without_a_call(self, tmp_path):
        result = CliRunner().invoke(app, ["replay", str(tmp_path)])
        assert result.exit_code == 2 and "holds no saved call" in result.output

    def test_what_no_script_saved(self, tmp_path):
        (tmp_path / "call.json").write_text('{"format": 1, "program": null}')
        result = CliRunner().invoke(app, ["replay", str(tmp_path)])
        assert result.exit_code == 2
        assert "saved in a notebook or at a prompt" in result.output

    def test_another_format(self, tmp_path):
        (tmp_path / "call.json").write_text('{"format": 2}')
        result = CliRunner().invoke(app, ["replay", str(tmp_path)])
        assert result.exit_code == 2 and "has format 2" in result.output
