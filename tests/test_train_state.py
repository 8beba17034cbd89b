"""The state: strong types, no array twice, moving averages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same import assert_same
from stepping import batch_of, make, mlp_params, square_rows

from lockstep.step import TrainState, make_train_step


def type_of(leaf):
    return f"{leaf.dtype} weak" if getattr(leaf, "weak_type", False) else leaf.dtype


class TestState:
    def test_a_run_compiles_once_and_keeps_every_type(self):
        traces = []

        def loss(params, batch, key):
            traces.append(key)
            return square_rows(params, batch) + 0.0 * jax.random.uniform(key)

        optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
        step = make(loss, optimizer=optimizer, ema=0.9, loss_scale="dynamic")
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp_params())
        state = step.init(params, key=jax.random.key(0))
        types = jax.tree.map(type_of, state)
        assert "weak" not in str(types)
        compiled = jax.jit(step, donate_argnums=0)
        for _ in range(3):
            state, _ = compiled(state, batch_of(8))
            assert jax.tree.map(type_of, state) == types
        assert len(traces) == 1
        assert state.params["out"].dtype == jnp.bfloat16
        assert state.ema["out"].dtype == jnp.float32

    def test_no_array_is_in_it_twice(self):
        keeps_params = optax.GradientTransformation(
            init=lambda params: {"shadow": params},
            update=lambda updates, state, params=None: (updates, state),
        )
        w = jnp.ones(3)
        step = make(
            lambda params, x: params["a"].sum() * params["b"].sum() * x,
            optimizer=keeps_params,
            ema=0.5,
        )
        state = step.init({"a": w, "b": w})
        arrays = jax.tree.leaves(state)
        pointers = {x.unsafe_buffer_pointer() for x in arrays}
        assert len(pointers) == len(arrays)
        state, _ = jax.jit(step, donate_argnums=0)(state, jnp.ones(2))
        assert w.is_deleted()  # taken over without a copy
        assert float(state.ema["a"][0]) == 1.0 + 0.5 * 3.0

    def test_numpy_and_python_numbers_become_strong_arrays(self):
        step = make(lambda params, x: params["w"] * x * params["s"].sum())
        state = step.init({"w": 2.0, "s": np.ones(2, np.float32)})
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        assert not state.params["w"].weak_type
        assert state.step.dtype == jnp.int32

    def test_init_runs_under_jit(self):
        step = make(square_rows, optimizer=optax.adam(1e-2), ema=0.9)
        state = jax.jit(step.init)(mlp_params())
        assert_same(state, step.init(mlp_params()))

    @pytest.mark.parametrize(
        ("params", "found"),
        [
            ({"w": jnp.arange(3)}, r"params\['w'\] is int32\[3\]"),
            ({"act": jnp.tanh}, r"params\['act'\] is "),
            ({"key": jax.random.key(0)}, r"params\['key'\] is key<fry>"),
        ],
    )
    def test_parameters_without_gradient_are_named(self, params, found):
        step = make(lambda params, batch: batch)
        with pytest.raises(TypeError, match=found + r".*nnx.split.*eqx.partition"):
            step.init(params)
        with pytest.raises(ValueError, match="nothing to train"):
            step.init({})

    @pytest.mark.parametrize("option", [{"ema": 0.9}, {"loss_scale": "dynamic"}])
    def test_the_state_of_a_step_with_other_options_is_refused(self, option):
        plain, more = make(square_rows), make(square_rows, **option)
        name = next(iter(option))
        with pytest.raises(ValueError, match=f"state.{name} is None, but needed"):
            more(plain.init(mlp_params()), batch_of(4))
        with pytest.raises(ValueError, match=f"state.{name} is there, but not used"):
            plain(more.init(mlp_params()), batch_of(4))

    def test_trees_of_other_parameters_are_refused(self):
        step = make_train_step(
            lambda p, b: (p["w"] * b).mean(), optax.adam(0.1), ema=0.9
        )
        state, batch = step.init({"w": np.ones(2, "f")}), np.ones((4, 2), "f")
        for changes, words in (
            ({"params": {"w": jnp.ones(2), "b": jnp.ones(1)}}, r"mu\['b'\] is missing"),
            ({"params": {"w": jnp.ones(3)}}, r"mu\['w'\] has shape \(2,\), not \(3,\)"),
            (
                {"ema": {"v": state.params["w"]}},
                r"an average of .*ema\['w'\] is missing",
            ),
            ({"opt_state": optax.sgd(0.1).init(state.params)}, r"count is missing"),
        ):
            with pytest.raises(ValueError, match=words + ".*step.init"):
                step(dataclasses.replace(state, **changes), batch)

    def test_an_optimizer_that_looks_at_values_may_start(self):
        def init(params):
            return {"start": float(params["w"][0])}

        def update(grads, state, params=None):
            return grads, state

        optimizer = optax.GradientTransformation(init, update)
        step = make_train_step(lambda p, b: (p["w"] * b).mean(), optimizer)
        state, _ = step(step.init({"w": np.ones(2, "f")}), np.ones((4, 2), "f"))
        assert float(state.opt_state["start"]) == 1.0

    def test_anything_else_is_no_state(self):
        step = make(square_rows)
        with pytest.raises(TypeError, match=r"tuple, not a TrainState.*step.init"):
            jax.jit(step)((mlp_params(), ()), batch_of(4))


def test_model_state_and_init_must_agree():
    stateful = make(lambda params, state, batch: None, model_state=True)
    with pytest.raises(ValueError, match="without model_state, and the loss takes"):
        stateful.init(mlp_params())
    with pytest.raises(ValueError, match="with model_state, and the loss takes no"):
        make(square_rows).init(mlp_params(), model_state={"n": jnp.zeros(())})


def test_a_train_state_is_what_init_makes():
    state = make(square_rows).init(mlp_params())
    assert isinstance(state, TrainState)
    assert state.model_state is state.key is state.ema is state.loss_scale is None


class TestEma:
    def test_values_by_hand_and_aliases(self):
        step = make(lambda params, x: params["w"] * x, ema=0.75)
        state = step.init({"w": jnp.asarray(1.0, jnp.bfloat16)})
        run = jax.jit(step, donate_argnums=0)
        for want_w, want_ema in ((0.0, 0.75), (-1.0, 0.3125)):
            state, _ = run(state, jnp.ones(4))
            assert float(state.params["w"]) == want_w
            assert float(state.ema["w"]) == want_ema
        assert state.eval_params["w"].dtype == jnp.bfloat16
        assert float(state.eval_params["w"]) == 0.3125

    def test_a_slow_average_moves_in_bfloat16_training(self):
        step = make(lambda params, x: params["w"] * x, ema=0.999)
        state = step.init({"w": jnp.asarray(1.0, jnp.bfloat16)})
        state, _ = step(state, jnp.ones(4))
        assert float(state.ema["w"]) == pytest.approx(0.999)
