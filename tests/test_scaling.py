"""Loss scaling: nothing vanishes, nothing moves on a skip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same import assert_same
from stepping import VIEWS, gradient, make, on_mesh

from lockstep.metrics import compute
from lockstep.step.scaling import DynamicScale, move, start


class TestLossScale:
    def test_16_bit_gradients_that_would_be_zero_are_not(self):
        x = jnp.full(4, 1e-8, jnp.float32)  # below float16's smallest number

        def loss(params, x):
            return params["w"].astype(jnp.float16).astype(jnp.float32) * x

        assert gradient(loss, x)[0] == 0.0
        for view, n in (("global", 1), ("device", 4)):
            for scale in ("dynamic", 2.0**15):
                step = make(loss, view, optax.sgd(1e6), loss_scale=scale)
                state = step.init({"w": jnp.ones(())})
                new, metrics = on_mesh(step, n)(state, x)
                got = 1.0 - float(new.params["w"])
                assert got == pytest.approx(1e-2, rel=1e-3)
                assert float(metrics["grad_norm"]) == pytest.approx(1e-8, rel=1e-3)

    @pytest.mark.parametrize("view", VIEWS)
    def test_one_device_overflows_and_nothing_moves_anywhere(self, view):
        def loss(params, model_state, batch, key):
            seen = {"seen": model_state["seen"] + 1.0}
            return params["w"] * batch, ({}, seen)

        schedule = optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.1}))
        step = make(
            loss, view, schedule, model_state=True, ema=0.5, loss_scale="dynamic"
        )
        state = step.init(
            {"w": jnp.ones(())},
            model_state={"seen": jnp.zeros(())},
            key=jax.random.key(0),
        )
        run = on_mesh(step, 4)
        bad = np.array([1, 1, np.inf, 1], np.float32)
        skipped, metrics = run(state, bad)
        for name in ("params", "opt_state", "model_state", "ema"):
            assert_same(getattr(skipped, name), getattr(state, name), 0.0)
        assert int(skipped.step) == 1 and int(skipped.loss_scale.skipped) == 1
        assert float(skipped.loss_scale.value) == 2.0**14
        got = compute(metrics)
        assert (got["skipped"], got["loss_scale"]) == (1.0, 2.0**15)
        assert got["grad_norm"] == 0.0

        moved, metrics = run(skipped, np.ones(4, np.float32))
        assert float(moved.params["w"]) == 0.0  # the schedule's first step, rate 1
        assert float(moved.ema["w"]) == 0.5
        assert float(moved.model_state["seen"]) == 1.0
        assert compute(metrics)["skipped"] == 0.0
        assert compute(metrics)["grad_norm"] == 1.0

    def test_skipping_does_not_compile_again(self):
        traces = []

        def loss(params, x):
            traces.append(x)
            return params["w"] * x

        step = make(loss, loss_scale="dynamic")
        state, run = step.init({"w": jnp.ones(())}), jax.jit(step)
        for x in (1.0, np.inf, np.nan, 1.0):
            state, _ = run(state, jnp.full(4, x))
        assert int(state.loss_scale.skipped) == 2
        assert float(state.params["w"]) == -1.0
        assert len(traces) == 1

    def test_a_fixed_scale_skips_nothing(self):
        step = make(lambda params, x: params["w"] * x, loss_scale=8.0)
        state, metrics = step(step.init({"w": jnp.ones(())}), jnp.full(2, np.nan))
        assert np.isnan(state.params["w"]) and "skipped" not in metrics


class TestMoves:
    def test_it_grows_after_the_interval_and_shrinks_at_once(self):
        scale = DynamicScale(initial=8.0, growth_interval=2)
        state = start(scale)
        seen = []
        for finite in (True, True, True, False, True, True):
            state = move(scale, state, jnp.array(finite))
            seen.append(float(state.value))
        assert seen == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
        assert int(state.skipped) == 1 and int(state.good_steps) == 0

    def test_it_stays_where_it_can_work(self):
        scale = DynamicScale(initial=1.0, growth_interval=1, factor=2.0**13)
        low = move(scale, start(scale), jnp.array(False))
        assert float(low.value) == 1.0
        for _ in range(3):
            low = move(scale, low, jnp.array(True))
        assert float(low.value) == 2.0**24

    def test_numbers_that_do_not_move_are_refused(self):
        for wrong in ({"initial": 0.0}, {"growth_interval": 0}, {"factor": 1.0}):
            with pytest.raises(ValueError, match="is no moving scale"):
                DynamicScale(**wrong)

    def test_a_scale_of_ones_own(self):
        step = make(lambda params, x: params["w"] * x, loss_scale=DynamicScale(4.0, 1))
        state, metrics = step(step.init({"w": jnp.ones(())}), jnp.ones(2))
        assert float(metrics["loss_scale"]) == 4.0
        assert float(state.loss_scale.value) == 8.0
