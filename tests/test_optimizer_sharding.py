"""The optimizer's state in shards: the same training in less memory, in both views."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same import assert_same
from stepping import VIEWS, on_mesh

from lockstep import debug
from lockstep.evaluation import evaluate
from lockstep.loop import Trainer
from lockstep.parallel import parallelize, per_device
from lockstep.placement import replicate
from lockstep.replicas import check_replicas
from lockstep.step import DynamicScale, make_train_step
from lockstep.tree import first_difference, nbytes

WIDE = 130  # 130 x 130 numbers are a large leaf, which 8 devices do not divide


def params_of():
    key = jax.random.key(3)
    return {
        "w": jax.random.normal(key, (WIDE, WIDE)) / 12,
        "b": jnp.full(WIDE, 0.1),
        "out": jax.random.normal(jax.random.key(4), (WIDE, 8)) / 12,
        "c": jnp.zeros(()),
    }


def rows(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return ((hidden @ params["out"] + params["c"] - batch["y"]) ** 2).mean(1)


def batches_of(count, n=16):
    rng = np.random.default_rng(5)
    return [
        {
            "x": rng.normal(size=(n, WIDE)).astype("f"),
            "y": rng.normal(size=(n, 8)).astype("f"),
        }
        for _ in range(count)
    ]


ADAM = optax.adamw(1e-2, eps=1e-3)  # which does not blow up rounding


def test_parameters_that_are_one_array(mesh_of):
    """Every leaf of the state has their structure, and the counts are no moments."""

    def rows(w, batch):
        return ((batch["x"] @ w - batch["y"]) ** 2).mean(1)

    found = {}
    for sharding in (None, "data"):
        step = make_train_step(
            rows, ADAM, axis_name="data", optimizer_sharding=sharding
        )
        run, state = per_device(step, mesh_of(4)), step.init(jnp.ones((WIDE, 8)))
        for batch in batches_of(3):
            state, _ = run(state, batch)
        found[sharding] = jax.device_get((state.params, state.opt_state))
    assert_same(found["data"], found[None])


@pytest.mark.parametrize(
    "params",
    [
        np.float32(0.5),
        {"w": np.float32(0.5), "none": np.zeros((0, 3), np.float32)},
        {"w": np.float32(0.5), "none": np.zeros(0, jnp.bfloat16)},
    ],
)
def test_scalars_and_arrays_without_numbers(params, mesh_of):
    def rows(params, batch):
        w = params["w"] if isinstance(params, dict) else params
        return ((batch["x"] * w - 1) ** 2).mean(1)

    one, parts = (
        make_train_step(rows, ADAM, axis_name="data", optimizer_sharding=sharding)
        for sharding in (None, "data")
    )
    want, _ = train(one, mesh_of(1), batches_of(2), one.init(params))
    got, _ = train(parts, mesh_of(8), batches_of(2), parts.init(params))
    assert first_difference(want, got) is None
    assert_same(jax.tree.leaves(got.params)[-1], jax.tree.leaves(want.params)[-1], 2e-6)


def make(view, optimizer=ADAM, sharding="data", **options):
    axis = "data" if view == "device" else None
    return make_train_step(
        rows, optimizer, axis_name=axis, optimizer_sharding=sharding, **options
    )


def parallel(step, mesh):
    return (per_device if step.view == "device" else parallelize)(step, mesh)


def train(step, mesh, batches, state=None):
    run = parallel(step, mesh)
    state = step.init(params_of()) if state is None else state
    for batch in batches:
        state, metrics = run(state, batch)
    assert run.compiles.count == 1
    return state, metrics


OPTIONS = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "microbatches": {"accumulate": 2, "ema": 0.9},
    "scaled": {"loss_scale": DynamicScale(initial=8.0, growth_interval=2)},
}


@pytest.mark.parametrize("view", VIEWS)
class TestTheSameTraining:
    @pytest.mark.parametrize("name", OPTIONS)
    def test_as_on_one_device(self, view, name, mesh_of):
        batches, options = batches_of(3), OPTIONS[name]
        whole = make("global", sharding=None, **options)
        want, expected = train(whole, mesh_of(1), batches)
        for n in (8,) if name != "plain" else (1, 8):
            got, metrics = train(make(view, **options), mesh_of(n), batches)
            grads = jax.grad(lambda p: rows(p, batches[0]).mean())(params_of())
            assert_same(got.params, want.params, 2e-6, grads=grads)
            assert_same(got.opt_state, want.opt_state, 1e-5)
            assert_same(got.ema, want.ema, 2e-6)
            for key, value in expected.items():
                assert float(metrics[key]) == pytest.approx(float(value), rel=1e-5)
            check_replicas(got)

    def test_a_step_that_overflows_changes_nothing(self, view, mesh_of):
        step = make(view, loss_scale=DynamicScale(initial=4.0))
        (batch,) = batches_of(1)
        start, _ = train(step, mesh_of(4), [batch])
        before = jax.tree.map(np.asarray, (start.params, start.opt_state))
        bad = {**batch, "x": batch["x"].copy()}
        bad["x"][0, 0] = np.inf
        after, metrics = train(step, mesh_of(4), [bad], start)
        assert float(metrics["skipped"]) == 1
        after = after.params, after.opt_state
        jax.tree.map(np.testing.assert_array_equal, after, before)

    @pytest.mark.full
    def test_in_a_loop(self, view, mesh_of):
        step, batches = make(view), batches_of(6)
        want, _ = train(step, mesh_of(4), batches)
        trainer = Trainer(step, mesh=mesh_of(4), steps_per_call=2)
        state = trainer.fit(step.init(params_of()), batches, epochs=1)
        assert_same(state, want, 1e-6)
        loss = parallelize(
            lambda state, batch: {"loss": rows(state.params, batch).mean()}, mesh_of(4)
        )
        assert np.isfinite(evaluate(loss, state, batches[:1])["loss"])

    @pytest.mark.full
    def test_against_one_device_by_the_debugger(self, view, mesh_of):
        step = parallel(make(view), mesh_of(4))
        debug.compare(step, step.fn.init(params_of()), batches_of(1)[0])


@pytest.mark.parametrize("view", VIEWS)
class TestMemory:
    @pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 8])
    def test_of_the_optimizer_falls_to_its_share(self, view, n, mesh_of):
        batch = batches_of(1)[0]
        need = {}
        for sharding in (None, "data"):
            step = make(view, sharding=sharding)
            run = parallel(step, mesh_of(n))
            state, _ = run(step.init(params_of()), batch)
            analysis = run.lower(state, batch).compile().memory_analysis()
            need[sharding] = analysis.argument_size_in_bytes
        moments = nbytes(state.opt_state)
        saved = need[None] - need["data"]
        # Leaves that do not divide stay whole in the global view.
        whole = 2 * (WIDE * WIDE + WIDE) * 4 if view == "global" and n == 8 else 0
        assert saved == pytest.approx((moments - whole) * (1 - 1 / n), rel=0.02)
        assert saved > 0

    def test_is_reused_from_step_to_step(self, view, mesh_of):
        step, batch = make(view), batches_of(1)[0]
        run = parallel(step, mesh_of(4))
        state, _ = run(step.init(params_of()), batch)
        old = jax.tree.leaves(state.carried_by(step) or state)
        state, _ = run(state, batch)
        assert all(leaf.is_deleted() for leaf in old)

    def test_is_told_before_there_are_arrays(self, view, mesh_of):
        step, batch = make(view), batches_of(1)[0]
        run = parallel(step, mesh_of(8))
        state = step.init(params_of())
        described = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh_of(8), P())
            ),
            state,
        )
        where = NamedSharding(mesh_of(8), P("data"))
        rows = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            for name, x in batch.items()
        }
        told = run.lower(described, rows).compile().memory_analysis()
        real = run.lower(state, batch).compile().memory_analysis()
        assert told.argument_size_in_bytes == real.argument_size_in_bytes


@pytest.mark.parametrize("view", VIEWS)
class TestTheState:
    def test_is_split_where_a_dimension_divides(self, view, mesh_of):
        state, _ = train(make(view), mesh_of(2), batches_of(1))
        moments = state.opt_state[0].mu
        specs = {name: leaf.sharding.spec for name, leaf in moments.items()}
        joined = P() if view == "device" else P("data")  # small: whole for a look
        assert specs == {"w": P("data"), "b": joined, "out": joined, "c": P()}
        assert all(
            x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params)
        )

    @pytest.mark.full
    def test_that_was_replicated_is_split(self, view, mesh_of):
        step = make(view)
        state = replicate(step.init(params_of()), mesh_of(2))
        state, _ = train(step, mesh_of(2), batches_of(2), state)
        assert state.opt_state[0].nu["w"].sharding.spec == P("data")

    @pytest.mark.full
    def test_moves_to_other_devices(self, view, mesh_of):
        step, batches = make(view), batches_of(3)
        want, _ = train(step, mesh_of(2), batches)
        state, _ = train(step, mesh_of(2), batches[:2])
        host = jax.tree.map(np.asarray, state)
        got, _ = train(step, mesh_of(8), batches[2:], host)
        assert_same(got, want, 2e-6)


def test_the_device_view_sums_and_gathers_slices(mesh_of):
    step, batch = make("device"), batches_of(1)[0]
    text = per_device(step, mesh_of(4)).lower(step.init(params_of()), batch)
    names = re.findall(
        r"= \(?\S.* (reduce-scatter|all-gather)\(", text.compile().as_text()
    )
    assert {"reduce-scatter", "all-gather"} == set(names)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("optimizer", "name"),
        [
            (
                optax.chain(optax.clip_by_global_norm(1.0), ADAM),
                "reduce_sum in clip_by",
            ),
            (optax.lamb(1e-2), "reduce_sum"),
            (optax.adafactor(1e-2), "other shapes"),
        ],
    )
    def test_an_optimizer_that_would_see_its_slice_only(self, optimizer, name, mesh_of):
        step = make("device", optimizer)
        with pytest.raises(ValueError, match=rf"{name}.*clip_norm=.*global view"):
            per_device(step, mesh_of(2))(step.init(params_of()), batches_of(1)[0])

    @pytest.mark.parametrize(
        "optimizer",
        [optax.chain(optax.clip_by_global_norm(1.0), ADAM), optax.lamb(0.1)],
    )
    def test_but_the_global_view_takes_any(self, optimizer, mesh_of):
        batches = batches_of(2)
        want, _ = train(make("global", optimizer, None), mesh_of(1), batches)
        got, _ = train(make("global", optimizer), mesh_of(8), batches)
        assert_same(got.params, want.params, 2e-6)

    def test_a_shard_map_of_the_users_own(self):
        step = make("device")
        with pytest.raises(RuntimeError, match="per_device"):
            on_mesh(step, 2)(step.init(params_of()), batches_of(1)[0])

    def test_options_that_do_not_go_together(self):
        with pytest.raises(ValueError, match="fixed_shards"):
            make("device", fixed_shards=8)
        with pytest.raises(ValueError, match="'model' and axis_name='data'"):
            make("device", sharding="model")
        with pytest.raises(TypeError, match="optimizer_sharding=True"):
            make("global", sharding=True)

    def test_an_axis_that_the_mesh_has_not(self, mesh_of):
        step = make("global", sharding="model")
        with pytest.raises(ValueError, match="no axis 'model'"):
            parallelize(step, mesh_of(2))(step.init(params_of()), batches_of(1)[0])


def test_any_axis_of_the_mesh_in_the_global_view(mesh_of):
    step, batches = make("global", sharding="model"), batches_of(2)
    mesh = mesh_of(8, {"data": 4, "model": 2})
    got, _ = train(step, mesh, batches)
    want, _ = train(make("global", sharding=None), mesh_of(1), batches)
    assert got.opt_state[0].mu["w"].sharding.spec == P("model")
    assert_same(got.params, want.params, 2e-6)


@pytest.mark.parametrize("view", VIEWS)
def test_a_mesh_of_explicit_axes(view, mesh_of):
    """As `jax.make_mesh` makes it."""
    explicit = jax.make_mesh(
        (4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4]
    )
    step = make(view)
    want, _ = train(step, mesh_of(4), batches_of(2))
    got, _ = train(step, explicit, batches_of(2))
    assert_same(jax.device_get(got.params), jax.device_get(want.params))
    assert_same(jax.device_get(got.opt_state), jax.device_get(want.opt_state))
    leaves = jax.tree.leaves((got.params, got.opt_state))
    assert all(leaf.sharding.mesh == explicit for leaf in leaves)


def test_a_look_gathers_what_is_joined_and_leaves_the_large_in_slices(mesh_of):
    """Small leaves cut out of slices would each be communication to compile."""
    state, _ = train(make("device"), mesh_of(2), batches_of(1))
    moments = state.opt_state[0].mu
    assert moments["b"].is_fully_replicated and moments["c"].is_fully_replicated
    assert not moments["w"].is_fully_replicated
