"""`lockstep run --rehearse N`: the first step of a script, compared."""

import pytest
from fresh_process import run_lockstep
from typer.testing import CliRunner

from lockstep import first_step, launch
from lockstep.cli import app

BARE = """
import sys
import jax, jax.numpy as jnp, numpy as np, lockstep as ls

def step(w, batch):
    grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(w)
    return w - 0.1 * jax.lax.{reduce}(grads, "data"), None

rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
step = ls.per_device(step)
w = ls.replicate(jnp.ones(3))
try:
    for batch in ls.prefetch([rows] * int(sys.argv[1]), step):
        w, _ = step(w, batch)
except BaseException:
    {caught}
print("trained", *sys.argv)
"""

TRAINER = """
import jax.numpy as jnp, numpy as np, optax, lockstep as ls

step = ls.make_train_step(lambda p, b: (b["x"] @ p - b["y"]) ** 2, optax.adam(0.1))
data = {"x": np.ones((32, 3), np.float32), "y": np.arange(32, dtype=np.float32)}
batches = ls.data.batches(data, global_batch_size=16, seed=0)
ls.Trainer(step).fit(step.init(jnp.zeros(3)), batches, epochs=2)
print("trained")
"""


def rehearse(folder, script, *arguments):
    path = folder / "train.py"
    path.write_text(script)
    return run_lockstep("run", "--rehearse", "4", str(path), *arguments)


@pytest.mark.parametrize(
    ("reduce", "caught", "code", "words"),
    [
        ("pmean", "raise", 0, "same: 1 and 4 devices give the same"),
        ("psum", "pass", 1, "likely cause: gradient 4.00 x: summed, not averaged"),
    ],
)
def test_the_first_step_is_compared_and_the_script_ends(
    tmp_path, reduce, caught, code, words
):
    script = BARE.format(reduce=reduce, caught=caught)
    result = rehearse(tmp_path, script, "5")
    assert result.returncode == code, result.stderr
    assert words in result.stdout
    assert ("trained" in result.stdout) == (caught == "pass")


def test_the_step_of_a_trainer(tmp_path):
    result = rehearse(tmp_path, TRAINER)
    assert result.returncode == 0, result.stderr
    assert "state.params" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("same: 1 and 4 devices")


def test_a_script_without_a_step(tmp_path):
    result = rehearse(tmp_path, "print('hello')")
    assert result.returncode == 2 and result.stdout == "hello\n"
    assert "came to its end without a step of lockstep" in result.stderr
    result = rehearse(tmp_path, "raise SystemExit(7)")
    assert result.returncode == 7


def test_the_option_simulates_the_devices(monkeypatch):
    counts = []
    monkeypatch.setattr(launch, "run", lambda program: None)
    monkeypatch.setattr(
        launch, "simulated", lambda n: counts.append(n) or pytest.MonkeyPatch.context()
    )
    assert CliRunner().invoke(app, ["run", "--rehearse", "4", "x.py"]).exit_code == 2
    arguments = ["run", "--simulate", "8", "--rehearse", "4", "x.py"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert counts == [4, 8]
    assert not first_step.waiting()
    assert CliRunner().invoke(app, ["run", "--rehearse", "1", "x.py"]).exit_code == 2
