"""The log of compiles says what changed, in a person's words."""

import logging

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lockstep as ls
from lockstep.compat import pmap
from lockstep.compiles import CompileLog


def test_the_reason_is_the_difference_to_the_nearest_call(caplog):
    log = CompileLog("step")
    log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((8, 2))})
    log.finish(1.5)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((5, 2))})
    assert log.entries[0].reason == "first call" and log.entries[0].seconds == 1.5
    assert log.entries[1].reason == "batch float64[8,2] -> float64[5,2]"
    assert "batch float64[8,2] -> float64[5,2]: compiling again" in caplog.text
    assert "(a short batch: remainder='pad' keeps one shape)" in caplog.text
    log.begin({"state": {"w": np.ones(2)}, "batch": np.ones((5, 3))})
    assert log.entries[2].reason == "batch float64[8,2] -> float64[5,3]" or (
        log.entries[2].reason == "batch float64[5,2] -> float64[5,3]"
    )
    assert str(log).splitlines()[0] == "step compile 1: 1.5 s, first call"


def test_new_and_lost_leaves_are_named_and_long_lists_are_cut():
    log = CompileLog("step")
    log.begin({"state": {"a": 1}})
    log.begin({"state": {c: 1 for c in "bcdef"}})
    assert "state['b'] is new (weak int[])" in log.entries[1].reason
    assert log.entries[1].reason.endswith("and 3 more")


def test_equal_leaves_point_to_the_containers():
    log = CompileLog("step")
    log.begin({"state": (1,)})
    log.begin({"state": [1]})
    assert "in other containers" in log.entries[1].reason


def test_a_limit_raises_before_the_compile():
    log = CompileLog("step", max_compiles=1)
    log.begin({"x": np.ones(2)})
    with pytest.raises(
        RuntimeError, match=r"second time, above max_compiles=1: x float64\[2\] -> "
    ):
        log.begin({"x": np.ones(3)})
    assert log.count == 1
    with pytest.raises(ValueError, match="max_compiles=0"):
        CompileLog("step", max_compiles=0)


def reasons(step):
    return [entry.reason for entry in step.compiles.entries]


def rows(count, **more):
    return {"x": np.arange(count, dtype=np.int32), **more}


class TestTheGlobalView:
    def test_a_short_batch_a_flag_and_a_weak_scalar(self, mesh_of):
        def fn(state, batch, lr):
            scale = 2 if batch["train"] else 1
            return state + scale * lr * batch["x"].mean(), None

        step = ls.parallelize(fn, mesh_of(4))
        state = step(1.0, rows(64, train=True), 0.1)[0]
        state = step(state, rows(60, train=True), 0.1)[0]
        state = step(state, rows(64, train=False), 0.1)[0]
        step(state, rows(64, train=True), jnp.float32(0.1))
        assert reasons(step) == [
            "first call",
            "batch['x'] int32[64] -> int32[60]",
            "static batch['train'] True -> False",
            "lr weak float32 -> float32",
        ]
        assert all(entry.seconds > 0 for entry in step.compiles.entries)

    def test_a_new_optimizer_with_the_same_leaves(self, mesh_of, caplog):
        def fn(state, batch):
            grads = jax.grad(lambda p: ((batch - p["w"]) ** 2).mean())(state.params)
            return state.apply_gradients(grads=grads), None

        def fresh():
            return flax.training.train_state.TrainState.create(
                apply_fn=None, params={"w": jnp.zeros(())}, tx=optax.adam(0.1)
            )

        step = ls.parallelize(fn, mesh_of(2), max_compiles=2)
        batch = np.ones(4, np.float32)
        state = step(fresh(), batch)[0]
        step(state, batch)
        assert caplog.text == ""
        step(fresh(), batch)
        assert "tree differs only in the function state.tx: reuse the optimizer" in (
            caplog.text
        )
        with pytest.raises(RuntimeError, match="third time, above max_compiles=2"):
            step(fresh(), batch)


def test_the_device_view_names_the_leaf_and_obeys_the_limit(mesh_of):
    def fn(w, x):
        return w + jax.lax.pmean(x.mean(), "data"), None

    step = ls.per_device(fn, mesh_of(2), max_compiles=1)
    w, _ = step(0.0, np.ones(8, np.float32))
    w, _ = step(w, np.ones(8, np.float32))
    with pytest.raises(RuntimeError, match=r"x float32\[8\] -> float32\[6\]"):
        step(w, np.ones(6, np.float32))
    assert reasons(step) == ["first call"]


def test_the_trainer_stops_at_its_limit_and_names_the_leaf(mesh_of):
    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), None), mesh=mesh_of(2), max_compiles=1
    )
    batches = [np.ones(n, np.float32) for n in (8, 8, 6)]
    with pytest.raises(RuntimeError, match=r"x float32\[8\] -> float32\[6\]"):
        trainer.fit(0.0, batches)


class TestCompatPmap:
    def test_names_rows_dtypes_and_static_arguments(self, caplog):
        caplog.set_level(logging.INFO, logger="lockstep")
        mapped = pmap(lambda w, x, lr: w + lr * x.mean(), static_broadcasted_argnums=2)
        w = mapped(np.zeros(2, np.float32), np.ones((2, 4), np.float32), 0.1)
        mapped(w, np.ones((2, 4), np.float32), 0.1)
        assert reasons(mapped) == ["first call"]
        mapped(w, np.ones((2, 3), np.float32), 0.1)
        mapped(w, np.ones((2, 4), np.float32), 0.2)
        mapped(w, np.ones((2, 4), np.int32), 0.1)
        assert reasons(mapped)[1:] == [
            "x float32[2,4] -> float32[2,3]",
            "static argument lr 0.1 -> 0.2",
            "x float32[2,4] -> int32[2,4]",
        ]
        assert all(entry.seconds > 0 for entry in mapped.compiles.entries)
        assert "<lambda> compiled in" in caplog.text

    def test_raises_above_the_limit(self):
        mapped = pmap(lambda x: 2 * x)
        mapped.compiles.max_compiles = 1
        mapped(np.ones((2, 3)))
        with pytest.raises(RuntimeError, match=r"x float32\[2,3\] -> float32\[2,4\]"):
            mapped(np.ones((2, 4)))

    def test_shares_its_log_between_mappings_of_one_function(self):
        def double(x):
            return 2 * x

        for _ in range(3):
            mapped = pmap(double)
            mapped(np.ones((2, 3)))
        assert reasons(mapped) == ["first call"]


def test_another_layout_of_equal_shapes_is_a_compile(mesh_of, caplog):
    mesh = mesh_of(2)
    step = ls.parallelize(lambda w, x: x.sum(), mesh, batch_argnums=())
    x, w = np.ones((4, 2), np.float32), np.float32(0)
    whole, split = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    for where in (whole, split, whole, split):
        step(w, jax.device_put(x, where))
    assert step.compiles.count == 2
    assert "x whole on every device -> split" in step.compiles.entries[1].reason
    assert "equal shapes, but" in caplog.text and "compiling again" in caplog.text


def test_another_layout_counts_for_max_compiles(mesh_of):
    mesh = mesh_of(2)
    step = ls.parallelize(lambda w, x: x.sum(), mesh, batch_argnums=(), max_compiles=1)
    x = np.ones((4, 2), np.float32)
    step(1.0, jax.device_put(x, NamedSharding(mesh, P())))
    with pytest.raises(RuntimeError, match="max_compiles=1: equal shapes, but"):
        step(1.0, jax.device_put(x, NamedSharding(mesh, P("data"))))
