"""Train steps whose small leaves are carried in vectors, against unpacked ones."""

import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from same import assert_same
from stepping import on_mesh

from lockstep.packing import Packed
from lockstep.parallel import parallelize, per_device
from lockstep.replicas import check_replicas
from lockstep.step import DynamicScale, TrainState, make_train_step, packed
from lockstep.tree import first_difference, named_leaves


def params_of(dtype=jnp.float32):
    key = jax.random.key(3)
    return [
        {
            "w": jax.random.normal(jax.random.fold_in(key, i), (4, 4), dtype),
            "b": jnp.full(4, 0.1, dtype),
        }
        for i in range(5)
    ]


def rows(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"].astype(x.dtype) + layer["b"].astype(x.dtype))
    return ((x - batch["y"]) ** 2).mean(1)


def counted(params, seen, batch):
    return rows(params, batch), ({}, seen + jax.lax.psum(batch["x"].shape[0], "data"))


def batches_of(count, n=16):
    rng = np.random.default_rng(5)
    return [
        {name: rng.normal(size=(n, 4)).astype("f") for name in "xy"}
        for _ in range(count)
    ]


ADAM = optax.adamw(optax.warmup_constant_schedule(0.0, 1e-2, 3))


def make(optimizer=ADAM, loss=rows, **options):
    return make_train_step(loss, optimizer, axis_name="data", **options)


def unpacked(monkeypatch, *args, **options):
    """The same step with the leaves as they are."""
    step = make(*args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "WORTHWHILE", 1000)
        assert "small leaves" in step.why_unpacked(step.init(params_of()))
    return step


def train(step, state, batches, mesh):
    run = per_device(step, mesh)
    for batch in batches:
        state, metrics = run(state, batch)
    assert run.compiles.count == 1
    return state, metrics


def mixed():
    """Leaves of two dtypes, in two vectors."""
    params = params_of()
    for layer in params[:3]:
        layer["w"] = layer["w"].astype(jnp.bfloat16)
    return params


CASES = {
    "plain": {},
    "clipped": {"optimizer": optax.sgd(0.1, momentum=0.9), "clip_norm": 0.1},
    "microbatches": {"accumulate": 2, "ema": 0.9},
    "scaled": {"loss_scale": DynamicScale(initial=4.0, growth_interval=2)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_packed_step_is_the_unpacked_one(name, mesh_of, monkeypatch):
    options = CASES[name]
    other = unpacked(monkeypatch, **options)
    step = make(**options)
    params = mixed() if name == "plain" else params_of()
    batches, mesh = batches_of(4), mesh_of(4)
    start = other.init(params)
    if name == "plain":
        packed_once(step, start, 2)
    want, expected = train_unpacked(monkeypatch, other, start, batches, mesh)
    got, metrics = train(step, step.init(params), batches, mesh)
    assert first_difference(want, got, "state") is None
    assert_same(got.params, want.params, 1e-6)
    assert_same(got.opt_state, want.opt_state, 1e-5)
    assert_same(got.ema, want.ema, 1e-6)
    for key, value in expected.items():
        assert float(metrics[key]) == pytest.approx(float(value), rel=1e-5)


def packed_once(step, state, vectors):
    """The state is packed into so many vectors."""
    carried = step.carry(state)
    assert isinstance(carried.params, Packed)
    assert len(carried.params.parts) == vectors


def train_unpacked(monkeypatch, step, state, batches, mesh):
    with monkeypatch.context() as patch:
        patch.setattr(packed, "WORTHWHILE", 1000)
        state, metrics = train(step, state, batches, mesh)
    assert state.carried_by(step) is None
    return state, metrics


@pytest.mark.parametrize("optimizer", [ADAM, optax.lion(1e-2), optax.sgd(0.1)])
def test_one_update_is_within_two_units_in_the_last_place(optimizer, monkeypatch):
    step, params = make(optimizer), params_of()
    grads = jax.tree.map(lambda p: jnp.sin(40 * p), params)
    state = step.init(params)
    whole, parts = state, step.carry(state)
    packing = parts.params.packing
    for _ in range(5):
        alone, joined = (
            jax.jit(lambda s, g: packed.update(optimizer, g, s.opt_state, s.params, 0))(
                s, g
            )
            for s, g in ((whole, grads), (parts, packing.pack(grads)))
        )
        for a, b in zip(
            jax.tree.leaves(optax.apply_updates(whole.params, alone[0])),
            jax.tree.leaves(
                packing.unpack(optax.apply_updates(parts.params, joined[0]).parts)
            ),
            strict=True,
        ):
            np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), 2)
        whole = dataclasses.replace(whole, opt_state=alone[1])
        parts = dataclasses.replace(parts, opt_state=joined[1])


@pytest.fixture(scope="module")
def trained(mesh_of):
    step = make(ema=0.9)
    run = per_device(step, mesh_of(4))
    before = step.init(params_of(), key=None)
    state, _ = run(before, batches_of(1)[0])
    assert state.carried_by(step) is not None
    return step, run, before, state


class TestTheStateLooksTheSame:
    def test_to_trees(self, trained):
        step, _, before, state = trained
        assert type(state) is TrainState
        assert jax.tree.structure(state) == jax.tree.structure(before)
        names = [path for path, _ in named_leaves(state, "state")]
        assert "state.opt_state[0].mu[4]['b']" in names
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, before)
        doubled = jax.tree.map(lambda x: 2 * x, state)
        np.testing.assert_array_equal(
            doubled.params[1]["w"], 2 * np.asarray(state.params[1]["w"])
        )
        check_replicas(state)

    def test_to_readers(self, trained):
        _, _, _, state = trained
        assert state.params is state.params  # unpacked once
        assert state.params[0]["w"].shape == (4, 4) and int(state.step) == 1
        assert state.eval_params[0]["b"].dtype == jnp.float32
        assert state.loss_scale is None
        assert "opt_state=" in repr(state)
        with pytest.raises(AttributeError, match="no attribute 'weights'"):
            _ = state.weights

    def test_to_copies(self, trained):
        step, _, _, state = trained
        for other in (
            copy.copy(state),
            copy.deepcopy(state),
            pickle.loads(pickle.dumps(state)),
            dataclasses.replace(state),
        ):
            assert other.carried_by(step) is None
            jax.tree.map(np.testing.assert_array_equal, other, state)

    def test_a_changed_state_is_what_trains_on(self, trained):
        step, run, _, state = trained
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        batch = batches_of(1)[0]
        new, metrics = run(dataclasses.replace(state, params=zeros), batch)
        want = float((batch["y"] ** 2).mean())
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-6)
        assert run.compiles.count == 1 and int(new.step) == 2

    @pytest.mark.parametrize("sharding", [None, "data"])
    def test_what_is_written_into_it_is_what_trains_on(self, mesh_of, sharding):
        """As Optax's own way to set a learning rate does."""
        adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
        step = make(adam, optimizer_sharding=sharding)
        run, batch = per_device(step, mesh_of(2)), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        before = jax.device_get(state.params)
        assert state.carried_by(step) is not None  # looking changes nothing
        state.params[0]["b"] = jnp.full(4, 3.0)
        state.opt_state.hyperparams["learning_rate"] = jnp.zeros(())
        state, _ = run(state, batch)
        before[0]["b"] = np.full(4, 3.0)
        jax.tree.map(np.testing.assert_array_equal, state.params, before)
        assert state.carried_by(step) is not None and run.compiles.count == 1

    @pytest.mark.parametrize("sharding", [None, "data"])
    def test_parameters_in_another_tree_are_refused(self, sharding, mesh_of):
        step = make(optimizer_sharding=sharding)
        run, batch = per_device(step, mesh_of(4)), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        first, *others = state.params
        for params, words in (
            (others, "mu[4]['b'] is too many"),
            ([first, *others, first], "mu[5]['b'] is missing"),
            (
                [{**first, "b": jnp.ones((1, 4))}, *others],
                "mu[0]['b'] has shape (4,), not (1, 4)",
            ),
        ):
            text = r"what the optimizer keeps for .*opt_state\[0\]\." + re.escape(words)
            with pytest.raises(ValueError, match=text):
                run(dataclasses.replace(state, params=params), batch)

    def test_a_new_compile_names_the_leaf(self, mesh_of, caplog):
        step = make()
        run, batch = per_device(step, mesh_of(2)), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        state.params[2]["b"] = state.params[2]["b"].astype(jnp.bfloat16)
        run(state, batch)
        assert "state.params[2]['b'] float32[4] -> bfloat16[4]: comp" in caplog.text
        assert "state.params[2]['b'] float32[4]" in run.compiles.entries[1].reason

    def test_another_layout_names_the_leaves(self, mesh_of, caplog):
        mesh, step = mesh_of(4, {"data": 2, "model": 2}), make()
        run, batch = per_device(step, mesh, donate_argnums=()), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        split = NamedSharding(mesh, PartitionSpec("model"))
        run(
            dataclasses.replace(state, params=jax.device_put(state.params, split)),
            batch,
        )
        assert "state.params[0]['b'] and 9 more, packed whole on ev" in caplog.text

    def test_another_step_takes_it(self, mesh_of):
        state, _ = train(make(), make().init(params_of()), batches_of(1), mesh_of(2))
        sgd, batch = optax.sgd(0.1), batches_of(1)[0]
        other = dataclasses.replace(
            jax.tree.map(jnp.copy, state), opt_state=sgd.init(state.params)
        )
        other, _ = train(make(sgd), other, [batch, batch], mesh_of(2))
        assert int(other.step) == 3
        whole = make_train_step(rows, ADAM)
        state, metrics = parallelize(whole, mesh_of(2))(state, batch)
        assert int(state.step) == 2 and np.isfinite(float(metrics["loss"]))


class TestBetweenCalls:
    def test_nothing_is_packed_or_unpacked(self, mesh_of, monkeypatch):
        step = make()
        run, batch = per_device(step, mesh_of(2)), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        state, _ = run(state, batch)
        monkeypatch.setattr(
            "lockstep.step.train_state.unpack", lambda tree: pytest.fail("unpacked")
        )
        monkeypatch.setattr(
            "lockstep.step.train_step.pack_state", lambda *_: pytest.fail("packed")
        )
        for _ in range(3):
            state, _ = run(state, batch)
        assert int(state.step) == 5

    def test_the_memory_of_the_vectors_is_reused(self, mesh_of):
        step = make()
        run, batch = per_device(step, mesh_of(2)), batches_of(1)[0]
        state, _ = run(step.init(params_of()), batch)
        before = state.carried_by(step).params.parts[0]
        where = {s.data.unsafe_buffer_pointer() for s in before.addressable_shards}
        new, _ = run(state, batch)
        assert before.is_deleted()
        after = new.carried_by(step)
        pointers = {
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(after)
            for shard in leaf.addressable_shards
        }
        assert where <= pointers
        with pytest.raises(RuntimeError, match=r"state\.params.* was donated"):
            _ = state.params

    def test_a_step_has_one_all_reduce(self, mesh_of):
        step = make(clip_norm=1.0)
        run = per_device(step, mesh_of(4))
        text = run.lower(step.init(params_of()), batches_of(1)[0]).compile().as_text()
        assert len(re.findall(r"= \(?\S.* all-reduce\(", text)) == 1

    def test_several_steps_in_one_dispatch(self, mesh_of):
        step, batches = make(), batches_of(5)
        want, _ = train(step, step.init(params_of()), batches, mesh_of(2))
        run = per_device(step, mesh_of(2))
        state, _ = run(step.init(params_of()), batches[0])
        state, metrics = run.several(state, [(b,) for b in batches[1:]])
        assert len(metrics) == 4 and state.carried_by(step) is not None
        assert_same(state, want, 1e-6)

    def test_a_state_on_other_devices_is_brought_over(self, mesh_of):
        step, batch = make(), batches_of(1)[0]
        state, _ = per_device(step, mesh_of(1))(step.init(params_of()), batch)
        state, _ = per_device(step, mesh_of(4))(state, batch)
        leaf = state.params[0]["w"]
        assert int(state.step) == 2 and len(leaf.sharding.device_set) == 4

    def test_a_model_state_stays_beside_the_vectors(self, mesh_of):
        step = make(loss=counted, model_state=True)
        state = step.init(params_of(), model_state=jnp.zeros((), jnp.int32))
        state, _ = train(step, state, batches_of(2), mesh_of(4))
        assert int(state.model_state) == 32


class TestWhatIsNotPacked:
    @pytest.mark.parametrize("optimizer", [optax.lamb(1e-2), optax.adafactor(1e-2)])
    def test_other_optimizers_are_left_alone(self, optimizer, mesh_of):
        step, batches = make(optimizer), batches_of(2)
        state = step.init(params_of())
        assert "the optimizer" in step.why_unpacked(state)
        got, _ = train(step, state, batches, mesh_of(4))
        assert got.carried_by(step) is None
        whole = make_train_step(rows, optimizer)
        want, run = whole.init(params_of()), jax.jit(whole)
        for batch in batches:
            want, _ = run(want, batch)
        assert_same(got.params, want.params, 1e-6)

    def test_models_of_few_leaves(self):
        step = make()
        state = step.init(params_of()[:3])
        assert (
            step.why_unpacked(state) == "the optimizer has only 6 small leaves to join"
        )

    def test_inside_the_users_own_shard_map_only_the_arithmetic_is_packed(self):
        step, batch = make(), batches_of(1)[0]
        got, _ = on_mesh(step, 4)(step.init(params_of()), batch)
        want, _ = jax.jit(make_train_step(rows, ADAM))(step.init(params_of()), batch)
        assert_same(got.params, want.params, 1e-6)


def test_an_optimizer_that_takes_other_extra_arguments_gets_no_loss(mesh_of):
    """`sam` takes `grad_fn` and no `value`."""
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam = optax.contrib.sam(optax.sgd(0.1), ascent, sync_period=2)
    assert_steps_like_optax(sam, {"w": jnp.ones(3), "b": jnp.zeros(3)}, mesh_of(2))


def test_lookahead_gets_the_gradient_of_its_fast_parameters(mesh_of):
    ahead = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    params = {"w": jnp.ones(3), "b": jnp.zeros(3)}
    both = optax.LookaheadParams.init_synced(params)
    assert_steps_like_optax(ahead, both, mesh_of(2))


def assert_steps_like_optax(optimizer, params, mesh):
    def rows(params, batch):
        params = getattr(params, "fast", params)
        return ((batch * params["w"] + params["b"] - 2) ** 2).sum(-1)

    step = make_train_step(rows, optimizer, axis_name="data")
    run, state = per_device(step, mesh), step.init(params)
    opt_state, batch = optimizer.init(params), np.arange(12.0, dtype="f").reshape(4, 3)
    batch /= 12
    for _ in range(3):
        state, _ = run(state, batch)
        grads = jax.grad(lambda p: rows(p, batch).mean())(params)
        grads = getattr(grads, "fast", grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    for got, want in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
