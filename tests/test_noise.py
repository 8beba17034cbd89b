"""How far rounding moves an output: measured by moving the inputs."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.debug.comparing import noise
from lockstep.debug.comparing.trials import Trial, read_call
from lockstep.parallel import parallelize
from lockstep.step import make_train_step

UNEVEN = np.float32([0.1, 0.2, 0.3, 0.7])
WHOLE = np.float32([0, 1, 1, 0])


def prepared(fn, *args):
    step = parallelize(fn)
    return Trial(step, 1), read_call(step, args, {})


def test_numbers_move_by_their_last_place_and_masks_stay():
    state = {"w": UNEVEN, "count": np.int32(3), "half": UNEVEN.astype(jnp.bfloat16)}
    trial, call = prepared(lambda s, b: b["x"].sum(), state, {"x": UNEVEN, "m": WHOLE})
    calls = list(noise.nudged(trial, call))
    assert len(calls) == noise.ROUNDS
    for moved in calls:
        after, batch = moved.args
        for a, b in ((after["w"], UNEVEN), (batch["x"], UNEVEN)):
            assert a.dtype == np.float32 and (a != b).any()
            np.testing.assert_allclose(a, b, rtol=2.5e-7)
        np.testing.assert_allclose(
            noise.wide(after["half"]), noise.wide(state["half"]), rtol=2**-7
        )
        assert after["count"] == 3
        np.testing.assert_array_equal(batch["m"], WHOLE)
    assert (calls[0].args[0]["w"] != calls[1].args[0]["w"]).any()


def test_numbers_that_are_read_as_bfloat16_move_by_its_places():
    trial, call = prepared(lambda w, x: (x * w).astype(jnp.bfloat16).sum(), 0.5, UNEVEN)
    moved = next(iter(noise.nudged(trial, call)))
    gap = np.abs(moved.args[1] / UNEVEN - 1)
    assert 1e-5 < gap.max() <= 2**-8


def test_movement_is_that_of_the_update():
    """The state of a step that changes nothing does not move."""
    trial, call = prepared(
        lambda w, x: (w, {"plain": w.sum(), "cancelled": (1 + w).sum() - w.sum()}),
        UNEVEN,
        WHOLE,
    )
    known = {out.path: out.value for out in trial(call)}
    moved = noise.movement(trial, call, known, noise.nudged(trial, call))
    assert moved["state"] == 0
    assert 0 < moved["metrics['plain']"] < 1e-6
    assert moved.keys() == known.keys()


def test_other_keys():
    step = make_train_step(lambda p, b, key: p * b, _Optimizer)
    state = step.init(jnp.ones(()), key=jax.random.key(0))
    table = np.uint32([[1, 2]])  # looks like raw keys, and is data
    trial, call = prepared(step, state, table)
    for moved in noise.redrawn(trial, call):
        assert moved.args[0].key != state.key
        np.testing.assert_array_equal(moved.args[1], table)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    trial, call = prepared(lambda w, x, keys, lr: x, 0.0, WHOLE, keys, 0.1)
    for moved in noise.redrawn(trial, call):
        assert (np.asarray(moved.args[2]) != np.asarray(keys)).any()
        assert moved.args[2].shape == keys.shape and moved.args[3] == 0.1


class _Optimizer:
    init = staticmethod(lambda params: ())
    update = staticmethod(lambda grads, state, params: (grads, state))
