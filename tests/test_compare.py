"""`compare`: healthy steps are the same; what is no fault is told from what is one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lockstep.debug import compare
from lockstep.metrics import Mean
from lockstep.parallel import parallelize, per_device
from lockstep.placement import replicate, shard_batch
from lockstep.step import make_train_step

ROWS = 16
OPTIMIZER = optax.adam(1e-2)
KEY = jax.random.key(0)


def make_params():
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(3, 4)), rng.normal(size=4)
    return {
        "w": jnp.asarray(w, jnp.float32),
        "b": jnp.zeros(4),
        "v": jnp.asarray(v, jnp.float32),
    }


def make_state(optimizer=OPTIMIZER):
    return make_params(), optimizer.init(make_params())


def make_batch(rows=ROWS):
    """Rows of three numbers; on 4 devices 4, 3, 2 and 1 of them are valid."""
    rng = np.random.default_rng(1)
    valid = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    return {
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32)[:rows],
        "y": rng.normal(size=ROWS).astype(np.float32)[:rows],
        "mask": np.ravel(valid).astype(np.float32)[:rows],
    }


def squares(params, batch):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]
    return (out - batch["y"]) ** 2


def plain_loss(params, batch):
    return squares(params, batch).mean()


def masked_loss(params, batch):
    mask = batch["mask"]
    return (squares(params, batch) * mask).sum() / mask.sum()


def dropout_loss(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return plain_loss(params, batch | {"x": 2 * keep * batch["x"]})


def make_step(loss=plain_loss, average=lambda grads: grads, optimizer=OPTIMIZER):
    """A train step as people write it; `average` is what a device view adds."""

    def step(state, batch, *key):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch, *key)
        updates, opt_state = optimizer.update(average(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return step


def pmean(values):
    return lax.pmean(values, "data")


def psum(values):
    return lax.psum(values, "data")


def verdicts(report):
    return {row.path: row.verdict for row in report.rows}


@pytest.mark.parametrize(
    ("step", "rest", "view"),
    [
        (make_step(), (), {}),
        (make_step(masked_loss), (), {}),
        (make_step(dropout_loss), (KEY,), {}),
        (make_step(average=pmean), (), {"axis_name": "data"}),
        (parallelize(make_step()), (), {}),
        (per_device(make_step(average=lambda g: lax.pmean(g, "i")), axis_name="i"),)
        + ((), {}),
    ],
    ids=["plain", "masked", "dropout", "device", "parallelize", "per_device"],
)
def test_a_healthy_step_is_the_same(step, rest, view):
    report = compare(step, make_state(), make_batch(), *rest, **view)
    assert report.same and report.causes == () and report.advice == ""
    assert set(verdicts(report).values()) <= {"equal", "rounding"}
    assert [row.path for row in report.rows][:3] == [
        f"state[0]['{name}']" for name in "bvw"
    ]


@pytest.mark.parametrize("axis_name", [None, "data"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_train_step_with_a_mask_is_the_same(axis_name, accumulate):
    def loss(params, batch):
        return Mean.of(squares(params, batch), batch["mask"])

    step = make_train_step(
        loss, OPTIMIZER, axis_name=axis_name, accumulate=accumulate, clip_norm=0.1
    )
    report = compare(step, step.init(make_params()), make_batch())
    assert report.same, report


def test_a_train_step_that_draws_is_the_same_in_the_global_view():
    step = make_train_step(dropout_loss, OPTIMIZER)
    report = compare(step, step.init(make_params(), key=KEY), make_batch())
    assert report.same and verdicts(report)["state.key"] == "equal"


def test_rounding_comes_with_its_figure():
    """Case E6: the means of 33 times 4096 squares."""
    x = np.random.default_rng(0).normal(size=(4096, 33)).astype(np.float32)
    report = compare(lambda w, x: (w, (x**2).mean(0)), 1.0, x)
    row = report.rows[1]
    assert (row.path, row.verdict) == ("metrics", "rounding")
    assert 0 < row.difference < 3e-7
    assert f"differences up to {row.difference:.1e} are rounding" in str(report)


def test_float64_is_held_to_its_own_rounding(float64):
    w = np.random.default_rng(0).normal(size=3)

    def step(w, x):
        wrong = jnp.where(x.shape[0] == 8, 0.0, 1e-9)  # a fault of 1e-9
        return w - 0.1 * pmean((x * (w + wrong)).mean(0)), None

    x = np.random.default_rng(1).normal(size=(8, 3))
    assert not compare(step, w, x, axis_name="data").same
    assert compare(step, w, x, axis_name="data", tolerance=1e-7).same


def test_a_gradient_of_rounding_alone_is_no_signal():
    """The bias before a normalisation has no gradient; Adam makes a step of it."""

    def loss(params, batch):
        hidden = batch["x"] @ params["w"] + params["b"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        return ((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2).mean()

    report = compare(make_step(loss), make_state(), make_batch())
    assert report.same, report
    found = verdicts(report)
    assert found["state[0]['b']"] == found["state[1][0].mu['b']"] == "no signal"
    assert found["state[0]['w']"] != "no signal"
    assert "no signal: rounding alone moves it" in str(report)


def test_bfloat16_inside_the_step_rounds_more_and_is_the_same():
    def loss(params, batch):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
        return plain_loss(*half).astype(jnp.float32)

    assert compare(make_step(loss), make_state(), make_batch()).same
    summed = compare(
        make_step(loss, psum), make_state(), make_batch(), axis_name="data"
    )
    assert not summed.same


def test_masks_that_depend_on_the_device_count_by_design():
    """In the device view the key is folded with the device's number."""
    step = make_step(dropout_loss, pmean)
    report = compare(step, make_state(), make_batch(), KEY, axis_name="data")
    assert report.same
    assert verdicts(report)["state[1][0].mu['w']"] == "random"
    assert "random: each device folds the key with its own number" in str(report)
    keys = jax.random.split(KEY, 4)  # or one a device
    assert compare(step, make_state(), make_batch(), keys, axis_name="data").same


def test_rows_and_values_of_each_device():
    def step(w, x):
        first = x[:1] + lax.axis_index("data")
        return {"rows": x * w, "all": psum(x.sum(0)), "first": first[0]}

    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    report = compare(step, 2.0, x, axis_name="data")
    assert verdicts(report) == {
        "output['all']": "equal",
        "output['first']": "per device",
        "output['rows']": "equal",
    }
    assert report.same and "not compared" in str(report)


def test_the_caller_keeps_everything(mesh_of):
    mesh = mesh_of(8)
    state, batch = replicate(make_state(), mesh), shard_batch(make_batch(), mesh)
    before = jax.tree.map(np.array, state)
    step = parallelize(make_step(), mesh)
    assert compare(step, state, batch, devices=(2, 8)).same
    assert step.compiles.count == 0
    jax.tree.map(np.testing.assert_array_equal, state, before)
    step(state, batch)  # donates
    with pytest.raises(RuntimeError, match=r"state\[0\]\['b'\] was donated"):
        compare(step, state, batch)


def test_weak_numbers_stay_weak():
    """A strong float32 learning rate would widen a bfloat16 state."""

    def step(state, x):
        w = state["w"] - state["lr"] * x.mean().astype(jnp.bfloat16)
        return {"w": w, "lr": state["lr"]}, None

    state = replicate({"w": jnp.ones(3, jnp.bfloat16), "lr": 0.1})
    assert compare(step, state, np.ones(8, np.float32)).same


def test_rows_that_do_not_divide(mesh_of):
    batch = make_batch(10)
    with pytest.raises(ValueError, match="has 10 rows; the 4 devices .* multiple of 4"):
        compare(make_step(), make_state(), batch)
    padded = parallelize(make_step(masked_loss), mesh_of(4), remainder="pad")
    assert compare(padded, make_state(), batch).same
    placed = padded.place_batch(batch)
    assert compare(padded, make_state(), placed, devices=(1, 8)).same
    dropped = compare(
        parallelize(make_step(), mesh_of(4), remainder="drop"), make_state(), batch
    )
    assert dropped.same
    assert "remainder='drop': 2 of 10 rows were left out on both" in str(dropped)


def test_a_mesh_with_two_axes(mesh_of):
    step = parallelize(make_step(), mesh_of(8, {"data": 4, "model": 2}))
    assert compare(step, make_state(), make_batch(), devices=(1, 8)).same


def test_a_function_of_the_batch_alone(mesh_of):
    step = parallelize(lambda x: (x**2).sum(), mesh_of(2), batch_argnums=0)
    report = compare(step, np.arange(8.0, dtype=np.float32))
    assert report.same and verdicts(report) == {"output": "equal"}


def test_what_cannot_be_compared_is_refused():
    state, batch = make_state(), make_batch()
    with pytest.raises(ValueError, match="comparing on 16 devices needs 16, and this"):
        compare(make_step(), state, batch, devices=(1, 16))
    with pytest.raises(ValueError, match="two numbers, the smaller first"):
        compare(make_step(), state, batch, devices=(4, 1))
    with pytest.raises(ValueError, match="this step averages by itself"):
        compare(make_step(average=pmean), state, batch)
    with pytest.raises(ValueError, match="averages nothing over 'data'"):
        compare(make_step(), state, batch, axis_name="data")
