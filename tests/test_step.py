"""`make_train_step` against values by hand and against one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same import assert_same
from stepping import (
    VIEWS,
    batch_of,
    gradient,
    make,
    mlp_params,
    on_mesh,
    plain_step,
    square_mean,
    square_rows,
)

from lockstep import notices
from lockstep.metrics import Mean
from lockstep.rng import step_key
from lockstep.step import make_train_step


class TestOneBatchIsTheWholeBatch:
    CELLS = (
        ("global", 1, 4, square_rows),
        ("global", 8, 2, square_mean),
        ("device", 4, 4, square_mean),
        ("device", 8, 1, square_rows),
    )

    def check(self, tol, dtype):
        optimizer, params = optax.adam(1e-2), mlp_params(dtype)
        batches = [batch_of(32, dtype) for _ in range(3)]
        by_hand = plain_step(square_mean, optimizer)
        want, opt_state, losses = params, optimizer.init(params), []
        for batch in batches:
            want, opt_state, value = by_hand(want, opt_state, batch)
            losses.append(float(value))
        grads = jax.grad(square_mean)(params, batches[0])
        for view, n, k, loss in self.CELLS:
            step = make(loss, view, optimizer, accumulate=k)
            state, run, got = step.init(params), on_mesh(step, n), []
            for batch in batches:
                state, metrics = run(state, batch)
                got.append(float(metrics["loss"]))
            assert_same(state.params, want, tol, grads=grads)
            assert_same(state.opt_state, opt_state, 10 * tol)
            np.testing.assert_allclose(got, losses, rtol=tol)
            assert int(state.step) == 3

    def test_in_float32(self):
        self.check(1e-6, np.float32)

    def test_in_float64(self, float64):
        self.check(1e-12, np.float64)

    def test_one_device_without_options_is_the_plain_step_to_the_bit(self):
        optimizer, params = optax.adamw(1e-2), mlp_params()
        step = make(square_mean, optimizer=optimizer)
        state, batch = step.init(params), batch_of(24)
        want, opt_state = params, optimizer.init(params)
        for _ in range(3):
            state, metrics = jax.jit(step)(state, batch)
            want, opt_state, value = plain_step(square_mean, optimizer)(
                want, opt_state, batch
            )
            assert metrics["loss"].total / 24 == pytest.approx(float(value), rel=3e-7)
        jax.tree.map(np.testing.assert_array_equal, state.params, want)


@pytest.mark.parametrize(("view", "n"), [("global", 1), ("global", 4), ("device", 4)])
class TestCasesByHand:
    def test_c1_masked_loss(self, view, n):
        x = jnp.arange(8.0)
        mask = jnp.array([1, 1, 1, 0, 0, 0, 1, 0.0])
        batch = {"x": x, "mask": mask}

        def by_rows(params, batch):
            return params["w"] * batch["x"]

        def by_sums(params, batch):
            return Mean.of(params["w"] * batch["x"], batch["mask"])

        def by_hand(params, batch):  # 0/0 on the third of four devices
            m = batch["mask"]
            return jnp.sum(params["w"] * batch["x"] * m) / jnp.sum(m)

        for loss in (by_rows, by_sums, by_hand):
            got, metrics = gradient(loss, batch, view, n)
            assert got == 2.25
            assert metrics["loss"] == Mean(9.0, 4.0)

    def test_c2_gradient_is_averaged_not_summed(self, view, n):
        got, metrics = gradient(
            lambda params, x: jnp.mean(params["w"] * x), jnp.arange(4.0), view, n
        )
        assert got == 1.5
        assert float(metrics["loss"]) == 1.5

    def test_c5_microbatches_with_unequal_tokens(self, view, n):
        # Rows of five tokens; with k = 2 and one device microbatch 0 has 4 tokens of
        # gradient 1 and microbatch 1 has one token of gradient 6.
        rows = 2 * n
        x, mask = np.zeros((rows, 5), np.float32), np.zeros((rows, 5), np.float32)
        x[0], mask[0, :4] = 1.0, 1.0
        x[1], mask[1, :1] = 6.0, 1.0

        def loss(params, batch):
            return Mean.of(params["w"] * batch["x"], batch["mask"])

        for k in (1, 2):
            got, metrics = gradient(loss, {"x": x, "mask": mask}, view, n, accumulate=k)
            assert got == 2.0
            assert float(metrics["loss"]) == 2.0

    def test_c8_grad_norm_is_that_of_the_average_and_clipping_acts_once(self, view, n):
        x = jnp.array([3.0, 1.0, 0.0, 1.0])
        got, metrics = gradient(
            lambda params, x: params["w"] * x, x, view, n, clip_norm=0.5
        )
        assert float(metrics["grad_norm"]) == 1.25
        assert got == 0.5
        got, metrics = gradient(
            lambda params, x: params["w"] * x,
            x,
            view,
            n,
            clip_norm=0.5,
            grad_norm=False,
        )
        assert "grad_norm" not in metrics and got == 0.5
        got, metrics = gradient(
            lambda params, x: params["w"] * x, x, view, n, clip_norm=2.0
        )
        assert got == 1.25


def test_c3_a_loss_that_averages_over_devices_by_itself_has_the_same_gradient():
    def loss(params, x):
        return jax.lax.pmean(jnp.mean(params["w"] * x), "data")

    got, metrics = gradient(loss, jnp.arange(4.0), "device", 4)
    assert got == 1.5 and float(metrics["loss"]) == 1.5


def test_check_vma_is_refused():
    step = make(lambda params, x: params["w"] * x, "device")
    mapped = jax.shard_map(
        step, mesh=make_mesh_of(4), in_specs=(P(), P("data")), out_specs=P()
    )
    with pytest.raises(RuntimeError, match="4 x too large"):
        jax.jit(mapped)(step.init({"w": jnp.ones(())}), jnp.arange(4.0))


def test_a_device_view_step_without_its_axis_says_per_device():
    step = make(lambda params, x: params["w"] * x, "device")
    with pytest.raises(RuntimeError, match="per_device"):
        jax.jit(step)(step.init({"w": jnp.ones(())}), jnp.arange(4.0))


class TestReductions:
    def compiled(self, **options) -> str:
        step = make(square_rows, "device", optax.adam(1e-2), **options)
        mapped = jax.shard_map(
            step,
            mesh=make_mesh_of(8),
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        lowered = jax.jit(mapped).lower(step.init(mlp_params()), batch_of(32))
        return str(lowered.compile().as_text())

    @pytest.mark.parametrize("k", [1, 4])
    def test_one_all_reduce_a_step(self, k):
        text = self.compiled(accumulate=k, loss_scale="dynamic")
        assert len(re.findall(r"= \(?\S.* all-reduce\(", text)) == 1

    def test_global_view_moves_no_row_to_another_device(self):
        step = make(square_rows, accumulate=4)
        mesh = make_mesh_of(8)
        state = jax.device_put(step.init(mlp_params()), NamedSharding(mesh, P()))
        batch = jax.device_put(batch_of(64), NamedSharding(mesh, P("data")))
        text = str(jax.jit(step).lower(state, batch).compile().as_text())
        assert "all-reduce" in text
        assert not re.search("all-to-all|collective-permute|all-gather", text)

    def test_16_bit_gradients_are_added_in_float32(self):
        # 256 + 1 is 256 in bfloat16: one device in eight would be heard.
        x = jnp.array([2048.0] + [8.0] * 7, jnp.bfloat16)
        step = make(lambda params, x: params["w"] * x, "device")
        state = step.init({"w": jnp.zeros((), jnp.bfloat16)})
        new, metrics = on_mesh(step, 8)(state, x)
        assert float(metrics["grad_norm"]) == 263.0
        assert float(new.params["w"]) == -float(jnp.bfloat16(263.0))
        assert new.params["w"].dtype == jnp.bfloat16


class TestKeys:
    """Each row draws; the draws are returned through a metric per row."""

    def step(self, view="global", k=1, **options):
        def loss(params, batch, key):
            draws = jax.random.uniform(key, batch["x"].shape)
            return params["w"] * batch["x"] * draws, {"draws": Mean(draws.sum(), 1.0)}

        return make(loss, view, accumulate=k, **options)

    def total(self, run, state, batch, *key):
        new, metrics = run(state, batch, *key)
        return new, float(metrics["draws"].total)

    def test_the_mask_is_that_of_one_device_in_the_global_view(self):
        batch, step = {"x": np.ones(8, np.float32)}, self.step()
        base = jax.random.key(7)
        state = step.init({"w": jnp.ones(())}, key=base)
        seen = []
        for i in range(3):
            want = float(jax.random.uniform(step_key(base, i), (8,)).sum())
            moved = [self.total(on_mesh(step, n), state, batch) for n in (1, 4, 8)]
            assert [total for _, total in moved] == pytest.approx([want] * 3, rel=1e-6)
            state = moved[0][0]
            seen.append(want)
        assert len(set(seen)) == 3

    def test_devices_and_microbatches_draw_with_keys_of_their_own(self):
        batch, base = {"x": np.ones(16, np.float32)}, jax.random.key(7)
        n, k = 4, 2
        step = self.step("device", k)
        state = step.init({"w": jnp.ones(())}, key=base)
        _, got = self.total(on_mesh(step, n), state, batch)
        keys = [
            jax.random.fold_in(jax.random.fold_in(step_key(base, 0), device), j)
            for device in range(n)
            for j in range(k)
        ]
        draws = [jax.random.uniform(key, (2,)) for key in keys]
        assert got == pytest.approx(float(jnp.sum(jnp.stack(draws))), rel=1e-6)
        assert len(np.unique(np.stack(draws))) == 16

    @pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
    @pytest.mark.parametrize("view", VIEWS)
    def test_a_key_a_call_is_the_same_as_one_in_the_state(self, view, make_key):
        batch, step, base = {"x": np.ones(8, np.float32)}, self.step(view), make_key(3)
        run = on_mesh(step, 4)
        params = {"w": jnp.ones(())}
        _, want = self.total(run, step.init(params, key=base), batch)
        _, got = self.total(run, step.init(params), batch, step_key(base, 0))
        assert got == want

    def test_keyword_keys(self):
        def loss(params, batch, *, rng):
            return params["w"] * batch * jax.random.uniform(rng)

        step = make(loss)
        state = step.init({"w": jnp.ones(())}, key=jax.random.key(0))
        new, _ = jax.jit(step)(state, jnp.ones(2))
        draw = jax.random.uniform(step_key(jax.random.key(0), 0))
        assert float(new.params["w"]) == pytest.approx(1.0 - float(draw))

    def test_wrong_keys(self):
        step, batch = self.step(), {"x": jnp.ones(4)}
        params = {"w": jnp.ones(())}
        state, key = step.init(params), jax.random.key(0)
        with pytest.raises(ValueError, match=r"a key \('key'\) and there is none"):
            step(state, batch)
        with pytest.raises(TypeError, match=r"array of keys of shape \(4,\)"):
            step(state, batch, jax.random.split(key, 4))
        with pytest.raises(TypeError, match="not a random key"):
            step.init(params, key=batch["x"])
        with pytest.raises(ValueError, match="use one of them"):
            step(step.init(params, key=key), batch, key)
        plain = make(lambda params, batch: params["w"] * batch["x"])
        assert step.takes_key and not plain.takes_key
        for call in (
            lambda: plain.init(params, key=key),
            lambda: plain(plain.init(params), batch, key),
        ):
            with pytest.raises(ValueError, match="takes no key"):
                call()


class TestOptimizers:
    def test_those_that_look_at_the_loss_get_it(self):
        optimizer = optax.chain(
            optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
        )
        loss = lambda params, x: jnp.mean(params["w"] * 0 + x)  # noqa: E731
        step = make(loss, optimizer=optimizer)
        state = step.init({"w": jnp.ones(())})
        for _ in range(4):
            state, _ = step(state, jnp.ones(2))
        assert float(state.opt_state[-1].best_value) == 1.0
        assert float(state.opt_state[-1].scale) < 1.0

    def test_c5_multi_steps_is_said_once_to_be_a_mean_of_means(self, caplog):
        notices.reset()
        multi = optax.MultiSteps(optax.sgd(1.0), 2)
        for optimizer in (multi, optax.chain(multi.gradient_transformation())):
            make(square_rows, optimizer=optimizer).init(mlp_params())
        said = [r.message for r in caplog.records]
        assert len(said) == 1 and "use accumulate=k" in said[0]

    def test_anything_else_is_refused(self):
        with pytest.raises(TypeError, match=r"str without init\(\).*optax.adamw"):
            make_train_step(square_rows, "adam")
        with pytest.raises(TypeError, match=r"function without init\(\)"):
            make_train_step(square_rows, optax.adam)

    def test_a_state_that_changes_is_named(self):
        grows = optax.GradientTransformation(
            init=lambda params: {"n": jnp.zeros(())},
            update=lambda updates, state, params=None: (updates, {"n": jnp.zeros(2)}),
        )
        step = make(square_rows, "global", grows)
        with pytest.raises(ValueError, match=r"state.opt_state\['n'\] was float32\[\]"):
            step(step.init(mlp_params()), batch_of(4))


@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_saveable])
def test_remat_computes_twice_and_gives_the_same(remat):
    plain, saving = make(square_rows), make(square_rows, remat=remat)
    state, batch = plain.init(mlp_params()), batch_of(8)
    want, _ = jax.jit(plain)(state, batch)
    got, _ = jax.jit(saving)(state, batch)
    assert_same(got, want)
    assert "remat" in str(jax.make_jaxpr(saving)(state, batch))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"accumulate": 0}, ValueError, "accumulate=0"),
        ({"accumulate": 2.0}, TypeError, "accumulate=2.0"),
        ({"clip_norm": 0}, ValueError, "clip_norm=0"),
        ({"ema": 1.0}, ValueError, "ema=1.0"),
        ({"loss_scale": "big"}, TypeError, "loss_scale='big'"),
        ({"loss_scale": -1.0}, ValueError, "loss_scale=-1.0"),
        ({"axis_name": 0}, TypeError, "axis_name=0"),
        ({"batch_norm": "global"}, ValueError, "batch_norm='global'"),
        ({"batch_norm": "local"}, ValueError, "device view"),
    ],
)
def test_options_out_of_range(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make_train_step(square_rows, optax.sgd(1.0), **options)


@pytest.mark.parametrize("view", VIEWS)
def test_rows_that_do_not_divide_into_microbatches(view):
    with pytest.raises(ValueError, match=r"6 rows here and accumulate=4.*4 or 8 rows"):
        step = make(square_rows, view, accumulate=4)
        on_mesh(step, 1)(step.init(mlp_params()), batch_of(6))
