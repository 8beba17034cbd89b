"""Losses and metrics read into sums: masks, weights, counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same
from stepping import VIEWS, batch_of, gradient, make, mlp_params, on_mesh, square_rows

from lockstep.metrics import Mean, compute, merge
from lockstep.placement import MaskedBatch


class TestMasks:
    @pytest.mark.parametrize("view", VIEWS)
    def test_padding_is_as_if_it_were_not_there(self, view):
        real = batch_of(5)
        padded = jax.tree.map(lambda a: np.concatenate([a, a[[4, 4, 4]]]), real)
        masked = MaskedBatch(padded, np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32))

        def loss(params, batch):
            rows = square_rows(params, batch)
            return rows, {"big": rows > 0.5, "mean": Mean.of(rows, batch.get("mask"))}

        step = make(loss, optimizer=optax.adam(1e-2))
        want, want_metrics = jax.jit(step)(step.init(mlp_params()), real)
        step = make(loss, view, optax.adam(1e-2))
        for n in (1, 8):
            got, metrics = on_mesh(step, n)(step.init(mlp_params()), masked)
            assert_same(got.params, want.params)
            assert compute(metrics) == pytest.approx(compute(want_metrics), rel=1e-6)
            assert float(metrics["loss"].count) == 5.0

    @pytest.mark.parametrize("view", VIEWS)
    def test_nothing_counts(self, view):
        batch = {"x": jnp.ones(8), "mask": jnp.zeros(8)}

        def scalar(params, batch):
            m = batch["mask"]
            value = jnp.sum(params["w"] * batch["x"] * m) / jnp.sum(m)
            return value, {"same": value}

        def rows(params, batch):
            return params["w"] * batch["x"]

        for loss, k in ((scalar, 1), (rows, 2)):
            got, metrics = gradient(loss, batch, view, 4, accumulate=k)
            assert got == 0.0
            assert compute(metrics)["loss"] == 0.0 == compute(metrics)["grad_norm"]
            assert float(metrics["loss"].count) == 0.0
            assert compute(metrics).get("same", 0.0) == 0.0

    def test_a_mask_of_tokens_needs_a_mean_of_tokens(self):
        batch = {"x": jnp.ones((4, 3)), "mask": jnp.ones((4, 3))}

        def rows(params, batch):
            return params["w"] * batch["x"].sum(1)

        def scalar(params, batch):
            return rows(params, batch).mean()

        with pytest.raises(ValueError, match=r"one value a row.*rank 2.*Mean.of"):
            gradient(rows, batch)
        with pytest.raises(ValueError, match=r"a scalar.*Mean.of.*mask=None"):
            gradient(scalar, batch, "device", 4)
        assert gradient(scalar, batch)[0] == 3.0  # one batch on one device is itself
        assert gradient(rows, batch, "device", 4, mask=None)[0] == 3.0

    def test_padding_reaches_a_mask_of_tokens(self):
        batch = {"x": jnp.arange(8.0).reshape(4, 2), "mask": jnp.ones((4, 2), bool)}
        masked = MaskedBatch(batch, jnp.array([1, 1, 0, 1.0]))

        def loss(params, batch):
            return Mean.of(params["w"] * batch["x"], batch["mask"])

        got, metrics = gradient(loss, masked, "device", 4)
        assert got == pytest.approx((0 + 1 + 2 + 3 + 6 + 7) / 6)
        assert float(metrics["loss"].count) == 6.0

    def test_another_name_of_the_mask(self):
        batch = {"x": jnp.array([1.0, 5.0]), "weights": jnp.array([1, 0])}
        loss = lambda params, batch: params["w"] * batch["x"]  # noqa: E731
        assert gradient(loss, batch, mask="weights")[0] == 1.0
        assert gradient(loss, batch)[0] == 3.0


_weights = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=16, max_size=16)


class TestAnyWeights:
    def loss(self, params, batch):
        values = params["w"] * batch["x"]
        return values, {
            "rows": values,
            "tokens": Mean.of(batch["t"], batch["tm"]),
        }

    runs = [
        (view, on_mesh(make(loss, view, accumulate=k), n))
        for view, n, k in [("global", 1, 1), ("global", 8, 2), ("device", 4, 2)]
        for loss in [lambda params, batch: TestAnyWeights().loss(params, batch)]
    ]
    step = make(lambda params, batch: params["w"] * batch["x"])

    @settings(max_examples=25, deadline=None)
    @given(_weights, st.lists(st.booleans(), min_size=48, max_size=48))
    def test_they_are_those_of_the_whole_batch(self, weights, tokens):
        x = np.linspace(-1, 3, 16, dtype=np.float32)
        t = np.linspace(0, 5, 48, dtype=np.float32).reshape(16, 3)
        m, tm = np.float32(weights), np.reshape(tokens, (16, 3))
        want = (x * m).sum(dtype=np.float64) / (m.sum() or 1.0)
        want_t = (t * tm).sum(dtype=np.float64) / (tm.sum() or 1)
        batch = {"x": x, "t": t, "tm": tm, "mask": m}
        for _, run in self.runs:
            new, metrics = run(self.step.init({"w": jnp.ones(())}), batch)
            got = compute(metrics)
            assert 1.0 - float(new.params["w"]) == pytest.approx(want, abs=1e-5)
            assert got["rows"] == pytest.approx(want, rel=1e-5, abs=1e-6)
            assert got["tokens"] == pytest.approx(want_t, rel=1e-5)
            assert float(metrics["tokens"].count) == tm.sum()
            assert float(metrics["loss"].count) == m.sum()


class TestMetrics:
    def test_scalars_rows_means_and_nested_names_are_weighed_by_rows(self):
        def loss(params, batch):
            rows = params["w"] * batch["x"]
            metrics = {
                "scalar": jnp.mean(batch["x"]),
                "sub": {"rows": batch["x"] > 1, "mean": Mean(batch["x"].sum(), 1)},
            }
            return rows, metrics

        batch = {"x": jnp.arange(8.0)}
        for view, n, k in [("global", 1, 1), ("device", 4, 1), ("device", 2, 2)]:
            _, metrics = gradient(loss, batch, view, n, accumulate=k)
            got = compute(metrics)
            assert got["scalar"] == 3.5
            assert got["sub/rows"] == 0.75
            assert got["sub/mean"] == 28.0 / (n * k)
            assert set(got) == {"loss", "scalar", "sub/rows", "sub/mean", "grad_norm"}

    def test_an_epoch_is_the_mean_over_its_rows(self):
        loss = lambda params, batch: jnp.mean(params["w"] * batch["x"])  # noqa: E731
        _, first = gradient(loss, {"x": jnp.array([1.0, 1.0, 1.0, 1.0])})
        _, last = gradient(loss, {"x": jnp.array([0.0])})
        assert compute(merge(first, last))["loss"] == 0.8

    def test_a_whole_number_is_a_count_and_no_mean(self):
        def loss(params, batch):
            return params["w"] * batch["x"], {"right": jnp.sum(batch["x"] > 1)}

        batch = {"x": jnp.arange(4.0)}
        for view, n, k in (("device", 4, 1), ("global", 1, 2)):
            with pytest.raises(ValueError, match=r"metric 'right' is a whole number"):
                gradient(loss, batch, view, n, accumulate=k)
        assert compute(gradient(loss, batch)[1])["right"] == 2.0

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (jnp.ones((2, 3)), r"float32\[2,3\]"),
            ("high", "str"),
            (None, "NoneType"),
            (jax.random.key(0), r"key<fry>\[\]"),
            (Mean(jnp.ones(2), 1), "Mean"),
        ],
    )
    def test_what_is_no_number_is_named(self, value, found):
        def loss(params, batch):
            return params["w"] * batch["x"], {"top": {"1": value}}

        with pytest.raises(ValueError, match=rf"metric 'top/1' is {found}"):
            gradient(loss, {"x": jnp.ones(4)})

    @pytest.mark.parametrize("name", ["loss", "grad_norm", "loss_scale", "skipped"])
    def test_a_taken_name_is_refused(self, name):
        def loss(params, batch):
            return params["w"] * batch["x"], {name: 1.0}

        with pytest.raises(ValueError, match=f"metric '{name}', and so does the step"):
            gradient(loss, {"x": jnp.ones(4)})
