"""The same bits on 1, 2, 4 and 8 devices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_mesh_of
from fixed_shards_models import (
    STEPS,
    attention,
    bits,
    cnn,
    digest,
    make,
    mlp_batches,
    mlp_loss,
    mlp_params,
    start,
    transformer,
)
from jax.sharding import PartitionSpec as P
from stepping import square_rows
from two_processes import outputs_of

import lockstep as ls
from lockstep.step import fixed_shards, make_train_step, train_step

SCRIPT = Path(__file__).with_name("fixed_shards_in_two_processes.py")


def train(n, step, params, batches, *, remainder="error", **state):
    """All bits after the steps on n devices: the state, and each step's metrics."""
    parallel = ls.per_device(step, make_mesh_of(n), remainder=remainder)
    now, metrics = start(step, params, **state), []
    for batch in batches:
        now, measured = parallel(now, batch)
        metrics.append(bits(measured))
    return bits(now), metrics


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    )
    for (path, a), b in named:
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


class TestSameBits:
    def test_mlp_with_dropout(self):
        step, params, batches = make(mlp_loss), mlp_params(), mlp_batches()
        want = train(8, step, params, batches)
        assert float(want[1][0]["loss"]) > float(want[1][-1]["loss"]) > 0
        for n in (1, 2, 4):
            assert_same_bits(train(n, step, params, batches), want)

    def test_every_option_at_once_with_a_short_last_batch(self):
        step = make(
            mlp_loss, accumulate=2, clip_norm=0.1, loss_scale="dynamic", ema=0.9
        )
        params, batches = mlp_params(), mlp_batches(32, last=13)
        one, eight = (train(n, step, params, batches, remainder="pad") for n in (1, 8))
        assert float(one[1][-1]["loss"].count) == 13
        assert_same_bits(one, eight)

    @pytest.mark.full
    def test_attention(self):
        # Its gradient is where a program for one device was simplified differently.
        _, params, batches = transformer()
        one, two = (train(n, make(attention), params, batches) for n in (1, 2))
        assert_same_bits(one, two)

    @pytest.mark.full
    @pytest.mark.parametrize("model", [cnn, transformer])
    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize("last", ["full", "ragged"])
    def test_of_models_on_all_counts(self, model, accumulate, last):
        rows = 16 * accumulate
        loss, params, batches = model(rows, rows if last == "full" else rows - 5)
        step, remainder = make(loss, accumulate=accumulate), "pad"
        want = train(8, step, params, batches, remainder=remainder)
        for n in (1, 2, 4):
            got = train(n, step, params, batches, remainder=remainder)
            assert_same_bits(got, want)

    def test_through_stops_on_other_counts(self):
        step, params, batches = make(mlp_loss), mlp_params(), mlp_batches()
        want, _ = train(4, step, params, batches)
        state = start(step, params)
        for n, batch in zip((8, 1, 2, 4), batches, strict=True):
            state, _ = ls.per_device(step, make_mesh_of(n))(state, batch)
            state = ls.to_host(state)
        assert_same_bits(bits(state), want)

    @pytest.mark.full
    def test_in_two_processes(self, tmp_path_factory):
        state, _ = train(4, make(mlp_loss), mlp_params(), mlp_batches())
        for output in outputs_of(SCRIPT, tmp_path_factory):
            assert f"digest: {digest(state)}\n" in output, output[-3000:]

    def test_several_steps_in_one_call(self):
        step, params, batches = make(mlp_loss), mlp_params(), mlp_batches()
        want, _ = train(8, step, params, batches)
        parallel = ls.per_device(step, make_mesh_of(2))
        state, _ = parallel(start(step, params), batches[0])
        state, _ = parallel(state, batches[1])
        state, _ = parallel.several(state, [(batch,) for batch in batches[2:]])
        assert parallel.compiles.count == 2  # one step, and two together
        assert_same_bits(bits(state), want)

    def test_statistics_of_the_shards(self):
        def loss(params, model_state, batch):
            mean = batch["x"].mean(0)
            value = square_rows(params, {**batch, "x": batch["x"] - mean})
            mean = 0.9 * model_state["mean"] + 0.1 * mean
            steps = model_state["steps"] + 1
            return value, ({}, {"mean": mean, "steps": steps})

        step = make(loss, model_state=True, batch_norm="local")
        start = {"mean": jnp.zeros(4), "steps": jnp.zeros((), jnp.int32)}
        args = step, mlp_params(), mlp_batches()
        one, eight = (train(n, *args, model_state=start) for n in (1, 8))
        assert one[0].model_state["steps"] == STEPS
        assert_same_bits(one, eight)


class TestFaultsThatWouldShow:
    """Each part of the mode is needed: without it the bits differ."""

    def test_the_plain_device_view_differs(self):
        def loss(params, batch):
            return square_rows(params, batch)

        step = make_train_step(loss, optax.adamw(3e-3), axis_name="data")
        one, eight = (train(n, step, mlp_params(), mlp_batches()) for n in (1, 8))
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            assert_same_bits(one, eight)

    @pytest.mark.full
    def test_without_its_compiler_options(self, monkeypatch):
        monkeypatch.setattr(train_step, "COMPILER_OPTIONS", None)
        _, params, batches = transformer()
        one, two = (train(n, make(attention), params, batches) for n in (1, 2))
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            assert_same_bits(one, two)

    def test_unsealed(self, monkeypatch):
        def loss(params, batch):  # the gradient ends with a multiply, beside the sum
            return jnp.sum(params["w"] * batch["x"] * 1.3, 1)

        rng = np.random.default_rng(0)
        batches = [{"x": rng.normal(size=(8, 500)).astype(np.float32)}]
        params = {"w": jnp.ones(500)}

        def on(n):
            return train(n, make(loss, optimizer=optax.sgd(1.0)), params, batches)

        assert_same_bits(on(1), on(8))
        monkeypatch.setattr(
            fixed_shards, "sealed", lambda alive, fn, _, *args: fn(*args)
        )
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            assert_same_bits(on(1), on(8))


class TestTheSameTraining:
    def test_as_one_device_on_the_whole_batch(self):
        plain = make_train_step(square_rows, optax.sgd(0.1))
        args = mlp_params(), mlp_batches(32, last=13)
        fixed = make(square_rows, optimizer=optax.sgd(0.1))
        got = train(4, fixed, *args, remainder="pad")
        parallel = ls.parallelize(plain, make_mesh_of(1))
        state = plain.init(mlp_params())
        for batch in args[1]:
            state, metrics = parallel(state, batch)
        for a, b in zip(
            jax.tree.leaves(got[0].params), jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert float(got[1][-1]["loss"]) == pytest.approx(float(metrics["loss"]))

    def test_every_shard_draws_for_itself_and_every_step_anew(self):
        def loss(params, batch, key):
            draw = jax.random.uniform(key)
            return params["w"] * batch, {"draw": ls.Mean(draw, 1.0)}

        step = make(loss, shards=4)
        draws = train(2, step, {"w": jnp.ones(())}, [np.ones(8, np.float32)] * 2)[1]
        want = []
        for number in range(2):
            key = ls.step_key(jax.random.key(3), number)
            keys = [jax.random.fold_in(key, i) for i in range(4)]
            want.append(np.mean([float(jax.random.uniform(k)) for k in keys]))
        got = [float(metrics["draw"]) for metrics in draws]
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got[0] != got[1]

    def test_compiled_once_and_donated(self):
        traces = []

        def loss(params, batch):
            traces.append(1)
            return square_rows(params, batch)

        step = make(loss)
        parallel = ls.per_device(step, make_mesh_of(4))
        state = ls.replicate(step.init(mlp_params()), parallel.mesh)
        before = state.params["out"]
        for batch in mlp_batches():
            state, _ = parallel(state, batch)
        assert len(traces) == 2  # once to see that no rows meet
        assert parallel.compiles.count == 1
        assert before.is_deleted()


class TestRefusals:
    @pytest.mark.parametrize("shards", [0, -8, 6])
    def test_shards_that_are_no_power_of_two(self, shards):
        with pytest.raises(ValueError, match=f"fixed_shards={shards} must be a power"):
            make(square_rows, shards=shards)

    @pytest.mark.parametrize("shards", [8.0, "8", True])
    def test_no_number(self, shards):
        with pytest.raises(TypeError, match="not a number of shards"):
            make(square_rows, shards=shards)

    def test_the_global_view(self):
        with pytest.raises(ValueError, match="in the global view the compiler splits"):
            make_train_step(square_rows, optax.sgd(0.1), fixed_shards=8)

    def test_more_devices_than_shards(self):
        text = r"fixed_shards=4 and runs on 8 devices: .* so use 1, 2, 4 devices"
        with pytest.raises(ValueError, match=text):
            ls.per_device(make(square_rows, shards=4), make_mesh_of(8))

    def test_rows_that_do_not_divide(self):
        step = ls.per_device(make(square_rows), make_mesh_of(2))
        state = step.fn.init(mlp_params())
        text = r"12 rows; the 2 devices .* times 4 .* shards need a multiple of 8"
        with pytest.raises(ValueError, match=text):
            step(state, mlp_batches(12)[0])

    @pytest.mark.parametrize(
        ("look", "what"),
        [
            (lambda x: jax.lax.pmean(x.mean(0), "data"), "psum"),
            (lambda x: jax.lax.all_gather(x, "data", tiled=True).mean(0), "all_gather"),
            (lambda x: 1.0 * jax.lax.axis_index("data"), "axis_index"),
        ],
    )
    def test_a_loss_that_looks_at_other_shards(self, look, what):
        def loss(params, batch):
            x = batch["x"] - look(batch["x"])
            return square_rows(params, {**batch, "x": x})

        step = ls.per_device(make(loss), make_mesh_of(2))
        state = step.fn.init(mlp_params())
        with pytest.raises(ValueError, match=f"looks beyond its own rows .{what}"):
            step(state, mlp_batches()[0])

    @pytest.mark.parametrize(
        ("mean", "text"),
        [
            (lambda x: x.mean(0), "rows of one fixed shard only: say batch_norm="),
            (lambda x: jax.lax.pmean(x.mean(0), "data"), "looks beyond its own rows"),
        ],
    )
    def test_batch_norm_that_was_not_asked_for(self, mean, text):
        def loss(params, model_state, batch):
            return square_rows(params, batch), ({}, {"mean": mean(batch["x"])})

        step = ls.per_device(make(loss, model_state=True), make_mesh_of(2))
        state = step.fn.init(mlp_params(), model_state={"mean": jnp.zeros(4)})
        with pytest.raises(ValueError, match=text):
            step(state, mlp_batches()[0])

    def test_parameters_of_two_widths(self, float64):
        params = {"w": jnp.ones(4, jnp.float64), "v": jnp.ones(4, jnp.float32)}
        step = make(lambda params, batch: batch["x"] @ (params["w"] * params["v"]))
        with pytest.raises(ValueError, match="trained in float32 and float64"):
            train(2, step, params, mlp_batches()[:1])

    def test_rows_that_do_not_divide_in_plain_shard_map(self):
        step = make(square_rows)
        state = step.init(mlp_params())
        batch = jax.tree.map(jnp.asarray, mlp_batches(12)[0])
        mapped = jax.shard_map(
            step,
            mesh=make_mesh_of(2),
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        with pytest.raises(ValueError, match="6 rows and 4 of the fixed shards"):
            jax.jit(mapped)(state, batch)
