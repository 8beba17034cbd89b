"""`ParallelStep.make_state`: a state that is born where it shall lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls


def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batch_of(rows=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
    }


@pytest.mark.parametrize("sharding", [None, "data"])
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_as_placed_by_a_copy(mesh_of, axis_name, sharding):
    made = ls.make_train_step(
        loss, optax.adam(0.1), axis_name=axis_name, optimizer_sharding=sharding
    )
    wrap = ls.parallelize if axis_name is None else ls.per_device
    step, other = wrap(made, mesh_of(4)), wrap(made, mesh_of(4))

    def init(key):
        return made.init({"w": jax.random.normal(key, (8,))})

    state = step.make_state(init, jax.random.key(0))
    copied = other.place_state(init(jax.random.key(0)))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(copied), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for batch in (batch_of(), batch_of()):
        state, _ = step(state, batch)
        copied, _ = other(copied, batch)
    assert step.compiles.count == 1
    np.testing.assert_allclose(state.params["w"], copied.params["w"], rtol=1e-5)


def test_a_state_in_place_of_a_function(mesh_of):
    step = ls.parallelize(lambda w, x: (w, {}), mesh_of(2))
    with pytest.raises(TypeError, match="got a dict: give the function"):
        step.make_state({"w": 1.0})


def test_of_a_plain_step(mesh_of):
    step = ls.parallelize(lambda w, x: (w + x.sum(), {"w": w}), mesh_of(2))
    state = step.make_state(jnp.zeros, ())
    assert len(state.sharding.device_set) == 2
    state, _ = step(state, np.ones(4, np.float32))
    assert float(state) == 4
