"""The code of three published guides to pmap: it runs, and what is wrong is reported.

Under `guides/` stands what they teach, written anew and small. Each wrong line of
theirs is kept in a comment beside the right one, so both forms are tested.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fresh_process import run_lockstep
from marked_lines import findings_in

from lockstep import compat

GUIDES = Path(__file__).parent / "guides"
PUBLISHED = re.compile(r"^( *)# published: (.*)\n.*\n", re.MULTILINE)
NAMES = re.compile(r"jax\.(pmap|device_put_replicated|device_put_sharded)\b")


def right(name: str) -> str:
    """The guide in the form that runs."""
    return (GUIDES / f"{name}.py").read_text()


def as_published(name: str) -> str:
    """The guide with the lines that it was published with."""
    return PUBLISHED.sub(r"\1\2\n", right(name))


def with_new_imports(name: str) -> str:
    """The guide with its pmap names taken from compat, and nothing else changed."""
    text = right(name).replace(
        "import jax\n", "import jax\nfrom lockstep import compat\n", 1
    )
    return NAMES.sub(r"compat.\1", text)


def run(text: str) -> tuple[dict, str]:
    """Runs a guide; its names and what it printed."""
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "guide.py", "exec"), names)
    return names, printed.getvalue()


def notebook(text: str) -> str:
    """The cells of a guide as a notebook."""
    cells = [
        {"cell_type": "code", "metadata": {}, "source": cell.splitlines(keepends=True)}
        for cell in text.split("# %%\n")[1:]
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=1)


@pytest.fixture
def four_devices(monkeypatch):
    """The guides speak of four devices."""
    devices = jax.devices()[:4]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_: devices)
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *_: 4)


@pytest.mark.usefixtures("four_devices")
class TestTheyRun:
    @pytest.mark.parametrize("name", ["data_parallel", "square", "frameworks"])
    def test_under_compat_as_with_new_imports(self, name):
        with compat.installed():
            names, printed = run(right(name))
        assert run(with_new_imports(name))[1] == printed
        losses = names.get("losses")
        assert losses is None or losses[-1] < 0.7 * losses[0]

    def test_the_state_stays_equal_on_all_devices(self):
        with compat.installed():
            names, _ = run(right("data_parallel"))
        for leaf in jax.tree.leaves(names["state"]):
            rows = np.asarray(leaf)
            assert rows.shape[0] == 4
            np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))

    def test_batches_are_placed_one_row_a_device(self):
        with compat.installed():
            images, labels = run(right("data_parallel"))[0]["placed"]
        assert images.shape == (4, 4, 4, 4, 1)
        assert labels.shape == (4, 4)
        assert images.addressable_shards[2].device == jax.devices()[2]

    def test_the_squares_are_right_and_pmap_removes_the_device_axis(self):
        with compat.installed():
            names, printed = run(right("square"))
        assert names["result"].tolist() == (np.arange(16).reshape(4, 4) ** 2).tolist()
        assert "Rank inside: 2 outside: 3" in printed

    def test_four_devices_train_as_one_does_on_the_whole_batch(self):
        with compat.installed():
            names, _ = run(right("frameworks"))
        np.testing.assert_allclose(names["losses"], losses_of_one_device(), rtol=1e-5)


def losses_of_one_device() -> list[float]:
    """What the guide to frameworks trains, without pmap."""
    names, _ = run(right("frameworks").partition("num_devices =")[0])
    state = names["state"]

    @jax.jit
    def step(state, image, label):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, image)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return jnp.mean(loss)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    data = np.random.default_rng(0)
    means = data.normal(size=(10, 4, 4, 1))
    losses = []
    for _ in range(20):
        labels = data.integers(0, 10, 16)
        state, loss = step(state, np.float32(means[labels]), labels)
        losses.append(float(loss))
    return losses


class TestTheirOwnErrorsAreReported:
    def errors(self, name):
        """Line by line, which rules speak of what was published."""
        lines = as_published(name).split("\n")
        found = findings_in("\n".join(lines))
        return {(f.rule, lines[f.line - 1].strip()) for f in found}

    def test_of_the_notebook(self):
        assert self.errors("data_parallel") >= {
            ("dead-extra", '%pip install -q -U "jax[cuda12_pip]" optax flax'),
            (
                "map-over-lists-of-shards",
                "lambda xs: jax.device_put_sharded(xs, jax.local_devices()),",
            ),
            (
                "gone-name",
                "return jax.device_put_replicated(state, jax.local_devices())",
            ),
            ("ordered-print", 'jax.debug.print("loss shard {}", loss, ordered=True)'),
            ("fetch-in-loop", "metrics_accumulator.append(jax.device_get(metrics))"),
            ("keys-split-in-batches", "rngs = jax.random.split(rngs, 2)[:, 0]"),
        }

    def test_of_the_introduction(self):
        claim = (
            "# On JAX 0.9+ pmap preserves the device axis: the function sees (1, 4)."
        )
        assert ("rank-claim", claim) in self.errors("square")

    def test_of_the_guide_to_frameworks(self):
        line = "replicated_state = jax.device_put_replicate(state, jax.local_devices())"
        assert ("unknown-name", line) in self.errors("frameworks")

    @pytest.mark.parametrize("name", ["data_parallel", "square", "frameworks"])
    def test_of_the_right_form_only_what_is_gone_and_what_comes_next(self, name):
        found = {f.rule for f in findings_in(PUBLISHED.sub(drop_comment, right(name)))}
        assert found <= {"gone-name", "next-step"}

    @pytest.mark.usefixtures("four_devices")
    @pytest.mark.parametrize(
        ("name", "error"),
        {
            "data_parallel": "must be a sequence",
            "frameworks": "device_put_replicate",
        }.items(),
    )
    def test_as_published_they_do_not_run(self, name, error):
        text = as_published(name).replace("%pip", "# %pip")
        with compat.installed(), pytest.raises(Exception, match=error):
            run(text)


def drop_comment(match: re.Match[str]) -> str:
    """The right line alone."""
    return match[0].split("\n", 1)[1]


@pytest.mark.full
def test_the_notebook_runs_as_a_notebook(tmp_path):
    install = "# (everything is installed)"
    text = right("data_parallel").replace(install, "%pip install -q optax flax")
    (tmp_path / "guide.ipynb").write_text(notebook(text))
    command = "run", "--simulate", "4", "--compat", "guide.ipynb"
    done = run_lockstep(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Total devices: 4" in done.stdout
    assert "Losses: [" in done.stdout
