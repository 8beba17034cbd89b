"""Any rows, weights and masks of tokens give what NumPy says, in one compiled shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep as ls
from lockstep.metrics import compute
from lockstep.parallel import as_parallel

MOST, TOKENS, RATE = 16, 3, 0.125
START = np.array([0.5, -1.0, 2.0])


@st.composite
def batches(draw):
    """Whole numbers, so that the reference is exact; any row or token may not count."""
    rows = draw(st.integers(1, MOST))

    def array(values, *shape):
        size = int(np.prod(shape))
        drawn = draw(st.lists(values, min_size=size, max_size=size))
        return np.reshape(np.array(drawn, np.float64), shape)

    number = st.integers(-4, 4)
    return {
        "x": array(number, rows, 3),
        "y": array(number, rows),
        "t": array(number, rows, TOKENS),
        "seen": array(st.booleans(), rows, TOKENS),
        "mask": array(st.sampled_from([0.0, 0.5, 1.0, 3.0]), rows),
    }


def errors(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


def tokens(batch):
    return ls.Mean.of(batch["t"], batch["seen"] * batch["mask"][:, None])


def rows_loss(w, batch):
    return errors(w, batch), {"tokens": tokens(batch)}


def own_step(w, batch):
    """A plain step, which finds its own mask and that of the padding in one."""

    def loss(w):
        return ls.Mean.of(errors(w, batch), batch["mask"]).compute()

    value, grad = jax.value_and_grad(loss)(w)
    norm = jnp.linalg.norm(grad)
    metrics = {"loss": value, "grad_norm": norm, "tokens": tokens(batch)}
    return w - RATE * grad, metrics


def by_numpy(batch):
    """One step of weighted least squares."""
    m, residual = batch["mask"], batch["x"] @ START - batch["y"]
    weights = batch["seen"] * m[:, None]
    grad = 2 * (m * residual) @ batch["x"] / (m.sum() or 1)
    return START - RATE * grad, {
        "loss": (m * residual**2).sum() / (m.sum() or 1),
        "grad_norm": np.linalg.norm(grad),
        "tokens": (batch["t"] * weights).sum() / (weights.sum() or 1),
    }


PROGRAMS = [
    (None, 8, 1),  # a step of one's own
    ("global", 8, 1),
    ("global", 4, 2),
    ("device", 8, 1),
    ("device", 4, 2),
]


@functools.cache
def program(view, devices, k):
    """A step on its devices, with the shape of the largest batch, and its state."""
    step, state = own_step, START
    if view is not None:
        axis_name = "data" if view == "device" else None
        step = ls.make_train_step(
            rows_loss, optax.sgd(RATE), axis_name=axis_name, accumulate=k
        )
        state = step.init(START)
    run = as_parallel(step, make_mesh_of(devices), remainder="pad")
    run.place_batch({"x": np.zeros(MOST)})  # padded batches become no smaller
    return run, state


@settings(max_examples=40, deadline=None)
@given(batch=batches())
@pytest.mark.parametrize(("view", "devices", "k"), PROGRAMS)
def test_a_step_is_that_of_numpy(view, devices, k, batch):
    want_w, want = by_numpy(batch)
    with jax.enable_x64(True):
        run, state = program(view, devices, k)
        new, metrics = run(state, batch)
        got_w = new if view is None else new.params
        np.testing.assert_allclose(got_w, want_w, rtol=1e-12, atol=1e-12)
        assert compute(metrics) == pytest.approx(want, rel=1e-12, abs=1e-12)
        assert run.compiles.count == 1


@functools.cache
def evaluation(remainder):
    run = ls.parallelize(
        lambda scale, batch: {"y": scale * batch["x"]},
        make_mesh_of(4),
        remainder=remainder,
    )
    run.place_batch({"x": np.zeros(8, np.float32)})
    return run


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5))
@pytest.mark.parametrize("remainder", ["pad", "unsplit"])
def test_every_row_of_every_batch_is_predicted_and_counted_once(remainder, sizes):
    rows = np.arange(sum(sizes), dtype=np.float32)
    cut = [{"x": part} for part in np.split(rows, np.cumsum(sizes)[:-1])]
    run = evaluation(remainder)
    np.testing.assert_array_equal(ls.predict(run, 2.0, cut)["y"], 2 * rows)
    assert ls.evaluate(run, 2.0, cut) == {"y": 2 * rows.mean(dtype=np.float64)}
    assert run.compiles.count <= {"pad": 1, "unsplit": 8}[remainder]
