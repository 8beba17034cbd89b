"""The example scripts: unchanged steps, and the same training on 1 to 8 devices."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from same import assert_same

EXAMPLES = Path(__file__).parent.parent / "examples"
GLOBAL_VIEW = ["plain", "linen", "nnx_example", "haiku_example", "equinox_example"]
STEPS = 4
COUNTS = [8, *(pytest.param(count, marks=pytest.mark.full) for count in (2, 4))]


def load(name):
    """The module of an example, which is no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_as_on_one(train, one, mesh):
    """Losses agree to 1e-6 relative, parameters per leaf; and there is training."""
    one_losses, one_params = train(one, STEPS)
    assert len(one_losses) == STEPS
    assert one_losses[-1] < 0.95 * one_losses[0]
    losses, params = train(mesh, STEPS)
    np.testing.assert_allclose(losses, one_losses, rtol=1e-6)
    assert_same(jax.device_get(params), jax.device_get(one_params))
    for leaf in jax.tree.leaves(params):
        assert len(leaf.sharding.device_set) == mesh.size


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", GLOBAL_VIEW)
def test_a_single_device_step_trains_the_same(name, count, mesh_of):
    assert_same_as_on_one(load(name).train, mesh_of(1), mesh_of(count))


@pytest.mark.parametrize("count", COUNTS)
def test_the_guides_step_trains_the_same(count, mesh_of):
    """Without dropout, whose mask in the device view depends on the device count."""
    train = functools.partial(load("guide_step").train, dropout=0.0)
    one, many = (mesh_of(n, {"batch": n}) for n in (1, count))
    assert_same_as_on_one(train, one, many)


def test_the_guides_dropout_differs_between_devices(mesh_of):
    """With other masks on two devices the loss is not the one of one device."""
    train = load("guide_step").train
    one, two = (train(mesh_of(n, {"batch": n}), 1)[0] for n in (1, 2))
    assert abs(one[0] - two[0]) > 1e-4


@pytest.mark.parametrize("name", [*GLOBAL_VIEW, "guide_step"])
def test_a_step_says_nothing_about_devices(name):
    """What stands between `def train_step` and the data is the user's own code."""
    text = (EXAMPLES / f"{name}.py").read_text()
    step = text[text.index("def train_step") : text.index("def batches")]
    assert "ls." not in step and "mesh" not in step and "device" not in step


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """What `make train` runs, on 4 devices, in an empty folder."""
    folder = tmp_path_factory.mktemp("digits")
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "digits.py"],
        cwd=folder,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "run"


@pytest.mark.full
def test_digits_learn(digits_run):
    output, _ = digits_run
    found = re.search(r"held-out images: (.*)% of 261 right, each once", output)
    assert found and float(found[1]) >= 97


@pytest.mark.full
def test_digits_report_devices_plan_and_replicas(digits_run):
    output, _ = digits_run
    assert "4 devices" in output or "4 simulated" in output
    assert "global 256 = 1 process x 4 devices x 64 rows" in output
    assert "replicas: equal on 4 devices" in output


@pytest.mark.full
def test_digits_write_what_they_say(digits_run):
    _, run = digits_run
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    assert list(rows) == list(range(6, 181, 6))
    names = {"loss", "accuracy", "examples_per_second", "valid/loss", "valid/accuracy"}
    assert all(names <= set(row) for row in rows.values())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
