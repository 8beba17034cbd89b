"""The global view: an unchanged single-device step over many devices."""

import dataclasses
import gc
import logging
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from same import assert_same

from lockstep.parallel import as_parallel, parallelize, per_device
from lockstep.placement import replicate, shard_batch, to_host
from lockstep.step import make_train_step

OPTIMIZER = optax.adam(1e-2)


def make_state():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        "v": jnp.asarray(rng.normal(size=4), jnp.float32),
    }
    return params, OPTIMIZER.init(params), 0


def make_batches(count=4, rows=16):
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(rows, 3)).astype(np.float32),
            "y": rng.normal(size=rows).astype(np.float32),
        }
        for _ in range(count)
    ]


def loss_of(params, batch):
    return ((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2).mean()


def train_step(state, batch):
    params, opt_state, n = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, n + 1), {"loss": loss}


def run(step, batches, *rest):
    state, losses = make_state(), []
    for batch in batches:
        state, metrics = step(state, batch, *rest)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_n_devices_train_as_one(mesh_of, devices):
    want_state, want = run(jax.jit(train_step), make_batches())
    state, losses = run(parallelize(train_step, mesh_of(devices)), make_batches())
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert_same(state[0], want_state[0])


def test_data_and_model_axes_train_as_one(mesh_of):
    want_state, want = run(jax.jit(train_step), make_batches())
    mesh = mesh_of(8, {"data": 4, "model": 2})
    state, losses = run(parallelize(train_step, mesh), make_batches())
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert_same(state[0], want_state[0])


def test_a_state_split_over_the_model_axis_stays_where_it_is(mesh_of):
    mesh = mesh_of(8, {"data": 4, "model": 2})
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    w = jax.device_put(np.ones((3, 4), np.float32), where)
    step = parallelize(lambda w, x: (w + (x @ w).mean(), x.sum()), mesh)
    out, _ = step(w, np.ones((8, 3), np.float32))
    out, _ = step(out, np.ones((8, 3), np.float32))
    assert out.sharding == where and step.compiles.count == 1


def test_one_trace_and_one_compile_whatever_the_state_was_made_of(mesh_of):
    traced = []

    def counted(state, batch):
        traced.append(1)
        return train_step(state, batch)

    step = parallelize(counted, mesh_of(8))
    run(step, make_batches())  # uncommitted arrays and a Python int
    assert (len(traced), step.compiles.count) == (1, 1)
    run(step, make_batches())  # a second fresh state
    assert (len(traced), step.compiles.count) == (1, 1)


def test_a_weak_leaf_that_comes_back_strong_compiles_once(mesh_of):
    step = parallelize(
        lambda s, b: ({"n": s["n"] + jnp.int32(1), "lr": s["lr"] * b.mean()}, None),
        mesh_of(4),
    )
    state = {"n": 0, "lr": 0.5}
    for _ in range(3):
        state, _ = step(state, np.ones(4, np.float32))
    assert step.compiles.count == 1 and int(state["n"]) == 3
    assert not state["n"].weak_type and not state["lr"].weak_type
    step({"n": 5, "lr": 0.25}, np.ones(4, np.float32))
    assert step.compiles.count == 1


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_state_moves_on(mesh_of, make):
    def step(state, batch):
        key, draw = jax.random.split(state["key"])
        return {"key": key}, batch.sum() * jax.random.uniform(draw)

    state, want = {"key": make(0)}, {"key": make(0)}
    parallel = parallelize(step, mesh_of(4))
    for _ in range(2):
        state, got = parallel(state, np.ones(4, np.float32))
        want, expected = jax.jit(step)(want, np.ones(4, np.float32))
        assert float(got) == float(expected)
    assert_same(state, want, 0.0)
    assert parallel.compiles.count == 1


def test_a_strong_leaf_that_comes_back_weak_compiles_once(mesh_of):
    step = parallelize(lambda s, b: (jnp.where(b.sum() > 0, 1.0, 2.0), b), mesh_of(2))
    state = jnp.float32(3)
    for _ in range(3):
        state, _ = step(state, np.ones(2, np.float32))
    assert step.compiles.count == 1 and not state.weak_type


def test_the_state_is_donated_and_the_callers_arrays_live(mesh_of):
    mine = make_state()
    step = parallelize(train_step, mesh_of(4))
    first, _ = step(mine, make_batches()[0])
    second, _ = step(first, make_batches()[0])
    assert not mine[0]["w"].is_deleted()
    assert first[0]["w"].is_deleted() and not second[0]["w"].is_deleted()
    with pytest.raises(RuntimeError, match=r"state\[0\]\['v'\] was donated"):
        step(first, make_batches()[0])


@pytest.mark.parametrize("read", [jax.device_get, to_host])
def test_a_donated_state_that_was_read_before_is_refused(mesh_of, read):
    """NumPy then holds the memory of one device, and JAX says the array is alive."""
    run = parallelize(lambda state, batch: (state + batch.mean(), None), mesh_of(4))
    state, _ = run(jnp.zeros(3), np.ones(8, np.float32))
    seen = read(state)
    run(state, np.ones(8, np.float32))
    with pytest.raises(RuntimeError, match="state was donated to an earlier"):
        run(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(seen, np.ones(3))


def test_reusing_part_of_a_donated_state_is_named(mesh_of):
    step = parallelize(train_step, mesh_of(4))
    first, _ = step(make_state(), make_batches()[0])
    params, opt_state, n = first
    second, _ = step(first, make_batches()[0])
    with pytest.raises(RuntimeError, match=r"state\[1\]\[0\].count was donated"):
        step((second[0], opt_state, second[2]), make_batches()[0])


def test_donation_reuses_the_memory_of_the_state(mesh_of):
    step = parallelize(train_step, mesh_of(4))
    state, _ = step(make_state(), make_batches()[0])

    def pointers(state):
        shards = state[0]["w"].addressable_shards
        return [s.data.unsafe_buffer_pointer() for s in shards]

    before = pointers(state)
    state, _ = step(state, make_batches()[0])
    assert pointers(state) == before


def test_an_evaluation_step_donates_nothing(mesh_of):
    state = replicate(make_state()[0], mesh_of(4))
    step = parallelize(lambda p, b: {"loss": loss_of(p, b)}, mesh_of(4))
    assert float(step(state, make_batches()[0])["loss"]) == pytest.approx(
        float(step(state, make_batches()[0])["loss"])
    )
    assert not state["w"].is_deleted()


def test_an_output_of_another_dtype_is_no_new_state_of_one_array(mesh_of):
    w = replicate(jnp.arange(4.0), mesh_of(2))
    signs = parallelize(lambda w, x: (w > x.mean()).astype(jnp.int32), mesh_of(2))
    np.testing.assert_array_equal(signs(w, np.ones(2, np.float32)), [0, 0, 1, 1])
    assert not w.is_deleted()


def test_donate_argnums_is_obeyed(mesh_of):
    state = replicate(make_state(), mesh_of(4))
    parallelize(train_step, mesh_of(4), donate_argnums=())(state, make_batches()[0])
    assert not state[0]["w"].is_deleted()


def test_at_most_two_steps_are_in_flight(mesh_of):
    step = parallelize(train_step, mesh_of(8))
    run(step, make_batches(8))
    assert len(step._run_ahead) <= 2
    step.wait()
    assert len(step._run_ahead) == 0


def test_a_step_without_metrics_is_bounded_too(mesh_of):
    step = parallelize(lambda s, b: s + b.mean(), mesh_of(8))
    state = jnp.zeros(())
    for _ in range(6):
        state = step(state, np.ones(8, np.float32))
    step.wait()
    assert float(state) == 6


def test_other_arguments_are_replicated_and_do_not_recompile(mesh_of):
    def step(w, batch, lr, *, scale):
        return w - lr * scale["s"] * batch.mean(), batch.sum()

    parallel = parallelize(step, mesh_of(4))
    batch = np.ones(4, np.float32)
    w, _ = parallel(jnp.zeros(()), batch, 0.1, scale={"s": 1.0})
    w, _ = parallel(w, batch, 0.2, scale={"s": 10.0})
    assert float(w) == pytest.approx(-2.1)
    assert parallel.compiles.count == 1


@pytest.mark.parametrize("argument", ["batch", "teacher"])
def test_a_deleted_argument_is_named(mesh_of, argument):
    mesh = mesh_of(2)
    step = parallelize(lambda w, batch, teacher: w + batch.mean() * teacher, mesh)
    args = {
        "batch": shard_batch(np.ones(4, np.float32), mesh),
        "teacher": replicate(np.float32(1), mesh),
    }
    args[argument].delete()
    with pytest.raises(RuntimeError, match=f"{argument} was donated to an earlier"):
        step(0.0, **args)


def test_one_array_in_two_places_is_donated_once(mesh_of):
    def step(state, batch, teacher):
        new = {k: v + batch.mean() * teacher["w"] for k, v in state.items()}
        return new, {"sum": sum(x.sum() for x in state.values())}

    mesh = mesh_of(4)
    batch = shard_batch(np.ones(4, np.float32), mesh)
    parallel = parallelize(step, mesh)
    weights = replicate(np.ones(2, np.float32), mesh)
    teacher = state = {"w": weights, "ema": weights}
    for _ in range(2):
        state, _ = parallel(state, batch, teacher)
        state = {"w": state["w"], "ema": state["w"]}
        teacher = state
    np.testing.assert_array_equal(state["w"], [4, 4])
    assert state["ema"].sharding.is_fully_replicated
    assert weights.is_deleted() and parallel.compiles.count == 1


def test_argument_numbers_count_from_zero_and_a_mesh_is_a_mesh(mesh_of):
    with pytest.raises(ValueError, match=r"batch_argnums=\(-1,\): number .* from 0"):
        parallelize(train_step, mesh_of(2), batch_argnums=-1)
    with pytest.raises(ValueError, match=r"donate_argnums=\(0, -2\)"):
        parallelize(train_step, mesh_of(2), donate_argnums=(0, -2))
    with pytest.raises(TypeError, match=r"make_mesh\(\) returns; got int"):
        parallelize(train_step, 8)


@pytest.mark.parametrize("view", [parallelize, per_device])
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_rows_that_one_part_holds_are_split_all_the_same(mesh_of, view, remainder):
    mesh = mesh_of(4, {"data": 1, "model": 4})
    step = view(lambda w, b: (w, b["x"].sum()), mesh, remainder=remainder)
    placed = step.place_batch({"x": np.ones(3, np.float32)})
    assert float(step(0.0, placed)[1]) == 3


def test_arguments_by_keyword_find_their_place(mesh_of):
    parallel = parallelize(train_step, mesh_of(4))
    batch = make_batches()[0]
    (params, _, n), _ = parallel(batch=batch, state=make_state())
    assert int(n) == 1
    with pytest.raises(TypeError, match="got 1 positional arguments"):
        parallel(make_state())


def test_a_big_argument_is_placed_once(mesh_of):
    teacher = jnp.ones(1000)
    step = parallelize(lambda w, b, t: (w + t.sum() * b.mean(), None), mesh_of(4))
    w = jnp.zeros(())
    for _ in range(3):
        w, _ = step(w, np.ones(4, np.float32), {"t": teacher}["t"])
    assert len(step._placer._replicas) == 1 and float(w) == 3000
    alive = weakref.ref(teacher)
    del teacher
    gc.collect()
    assert alive() is None


def test_static_arguments_choose_the_program(mesh_of):
    step = parallelize(lambda w, b, train: (w, b.sum() if train else -1.0), mesh_of(2))
    w = replicate(jnp.zeros(()), mesh_of(2))
    w, a = step(w, np.ones(2, np.float32), True)
    w, b = step(w, np.ones(2, np.float32), False)
    assert (float(a), float(b)) == (2.0, -1.0)


def test_a_plain_function_of_the_batch(mesh_of):
    square = parallelize(lambda x: x**2, mesh_of(8), batch_argnums=0)
    out = square(np.arange(16, dtype=np.float32))
    np.testing.assert_array_equal(out, np.arange(16.0) ** 2)
    assert not out.sharding.is_fully_replicated


def test_an_equinox_model_with_functions_as_leaves_trains(mesh_of):
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.sgd(0.1)

    def step(state, batch):
        model, opt_state = state
        arrays, rest = eqx.partition(model, eqx.is_inexact_array)

        def loss(arrays):
            out = jax.vmap(eqx.combine(arrays, rest))(batch["x"])[:, 0]
            return ((out - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(arrays)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": value}

    losses = {}
    for devices in (1, 4):
        parallel = parallelize(step, mesh_of(devices))
        state = (model, optimizer.init(params))
        losses[devices] = []
        for batch in make_batches(3):
            state, metrics = parallel(state, batch)
            losses[devices].append(float(metrics["loss"]))
        assert parallel.compiles.count == 1
        assert state[0].activation is model.activation
    np.testing.assert_allclose(losses[1], losses[4], rtol=1e-6)


def nnx_state():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def nnx_step(state, batch):
    model, optimizer = state

    def loss(model):
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return (model, optimizer), {"loss": value}


def test_nnx_modules_train_and_a_lost_mutation_is_an_error(mesh_of):
    parallel = parallelize(nnx_step, mesh_of(4))
    state = nnx_state()
    losses = []
    for _ in range(3):
        state, metrics = parallel(state, make_batches()[0])
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] and parallel.compiles.count == 1

    def lost(state, batch):
        return nnx_step(state, batch)[1]

    with pytest.raises(ValueError, match=r"return \(model, optimizer\), metrics"):
        parallelize(lost, mesh_of(4))(nnx_state(), make_batches()[0])


def test_the_batch_may_be_changed_inside_the_step(mesh_of):
    def step(w, batch):
        batch["x"] = batch["x"] / 2
        return w, batch["x"].sum()

    batch = {"x": np.ones(4, np.float32)}
    assert float(parallelize(step, mesh_of(4))(jnp.zeros(()), batch)[1]) == 2
    assert batch["x"].sum() == 4


def test_a_step_with_pmean_is_sent_to_per_device(mesh_of):
    def step(w, batch):
        return w - jax.lax.pmean(batch.mean(), "batch"), None

    with pytest.raises(ValueError, match=r"use per_device\(step, axis_name='batch'\)"):
        parallelize(step, mesh_of(4))(jnp.zeros(()), np.ones(4, np.float32))


def test_a_name_error_of_the_users_own_stays_one(mesh_of):
    with pytest.raises(NameError, match="undefined_name"):
        parallelize(lambda w, b: undefined_name, mesh_of(2))(0.0, np.ones(2))  # noqa: F821 # pyright: ignore


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: {**s, "new": s["w"]}, r"state\['new'\] is new"),
        (lambda s: {"w": s["w"], "b": s["b"]}, r"state\['c'\] is missing"),
        (lambda s: {**s, "b": s["b"][:1]}, r"state\['b'\] was float32\[2\]"),
        (
            lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)},
            r"state\['w'\] was float32\[3\] and is now bfloat16\[3\]",
        ),
    ],
)
def test_a_step_that_changes_its_state_is_named(mesh_of, change, text):
    state = {"w": jnp.ones(3), "b": jnp.ones(2), "c": jnp.ones(1)}
    step = parallelize(lambda state, b: (change(state), None), mesh_of(2))
    with pytest.raises(TypeError, match=text):
        step(state, np.ones(2, np.float32))


def test_a_state_on_other_devices_is_refused(mesh_of):
    elsewhere = jax.device_put(jnp.ones(3), jax.devices()[5])
    step = parallelize(lambda state, b: (state, None), mesh_of(4))
    with pytest.raises(
        ValueError, match=r"state\['w'\] is on device 5, and the mesh has devices 0, 1"
    ):
        step({"w": elsewhere}, np.ones(4, np.float32))


def test_a_state_on_another_mesh_is_refused(mesh_of):
    """Also where its devices are among those of the mesh."""
    smaller = replicate({"w": jnp.ones(3)}, mesh_of(4))
    step = parallelize(lambda state, b: (state, None), mesh_of(8))
    with pytest.raises(ValueError, match=r"state\['w'\] is on devices 0, 1, 2, 3, and"):
        step(smaller, np.ones(8, np.float32))


def test_an_unregistered_dataclass_is_no_state(mesh_of):
    @dataclasses.dataclass
    class State:
        w: jax.Array

    state = {"model": State(jnp.ones(3))}
    step = parallelize(lambda state, b: (state, None), mesh_of(2))
    text = r"state\['model'\] is a State, .*register_dataclass"
    with pytest.raises(ValueError, match=text):
        step(state, np.ones(2, np.float32))
    with pytest.raises(ValueError, match=text):
        replicate(state, mesh_of(2))


def test_a_state_of_one_leaf_may_not_change_its_shape(mesh_of):
    step = parallelize(lambda s, b: ({"w": s["w"][None]}, {}), mesh_of(2))
    with pytest.raises(TypeError, match=r"s\['w'\] was float32\[3\] and is now"):
        step({"w": jnp.ones(3)}, np.ones(2, np.float32))


def test_the_only_axis_of_a_mesh_splits_rows_under_any_name(mesh_of):
    mesh = mesh_of(4, {"batch": 4})
    placed = shard_batch(np.ones(8, np.float32), mesh)
    step = parallelize(lambda w, x: (w, x.sum()), mesh)
    assert float(step(jnp.zeros(()), placed)[1]) == 8


def test_a_state_on_one_device_of_the_mesh_is_copied_and_said_once(mesh_of, caplog):
    state = jax.device_put(make_state(), jax.devices()[2])
    step = parallelize(train_step, mesh_of(4))
    with caplog.at_level(logging.INFO, logger="lockstep"):
        run_state, _ = step(state, make_batches()[0])
    said = [r for r in caplog.records if "not on the mesh" in r.getMessage()]
    assert len(said) == 1 and not state[0]["w"].is_deleted()


def test_an_explicit_mesh_state_is_placed_on_the_auto_mesh(mesh_of):
    explicit = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    where = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec())
    state = jax.device_put(make_state()[0], where)
    step = parallelize(lambda p, b: {"loss": loss_of(p, b)}, mesh_of(4))
    assert float(step(state, make_batches()[0])["loss"]) > 0


def test_a_new_batch_shape_is_announced(mesh_of, caplog):
    step = parallelize(lambda w, x: (w, x.sum()), mesh_of(4), remainder="unsplit")
    w, _ = step(jnp.zeros(()), np.ones((8, 2), np.float32))
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        w, total = step(w, np.ones((5, 2), np.float32))
    assert float(total) == 10
    assert "x float32[8,2] -> float32[5,2]: compiling again" in caplog.text
    assert step.compiles.entries[1].seconds > 0


def test_placed_batches_pass_and_conflicts_raise(mesh_of):
    mesh = mesh_of(4)
    batch = np.ones(8, np.float32)
    step = parallelize(lambda w, x: (w, x.sum()), mesh)
    placed = shard_batch(batch, mesh)
    assert step.place_batch(placed) is placed
    padded = shard_batch({"x": batch[:5]}, mesh, remainder="pad")
    dropping = parallelize(lambda w, x: (w, None), mesh, remainder="drop")
    with pytest.raises(
        ValueError, match="placed with remainder='pad' and the step has"
    ):
        dropping(jnp.zeros(()), padded)
    whole = shard_batch(batch[:5], mesh, remainder="unsplit")
    assert float(step(jnp.zeros(()), whole)[1]) == 5


def test_dropped_rows_are_counted(mesh_of):
    step = parallelize(lambda w, x: (w, x.sum()), mesh_of(4), remainder="drop")
    w, total = step(jnp.zeros(()), np.ones(10, np.float32))
    assert float(total) == 8 and step.dropped_rows == 2
    assert step.place_batch(np.ones(3, np.float32)) is None and step.dropped_rows == 5
    with pytest.raises(ValueError, match="x has 3 rows, and remainder='drop' leaves"):
        step(w, np.ones(3, np.float32))


def test_lower_shows_the_partitioned_program(mesh_of):
    text = parallelize(train_step, mesh_of(4)).lower(make_state(), make_batches()[0])
    assert "num_partitions = 4" in text.as_text()


def test_a_train_step_knows_its_view(mesh_of):
    globally = make_train_step(loss_of, OPTIMIZER)
    locally = make_train_step(loss_of, OPTIMIZER, axis_name="data")
    with pytest.raises(ValueError, match="use per_device"):
        parallelize(locally, mesh_of(2))
    with pytest.raises(ValueError, match="use parallelize"):
        per_device(globally, mesh_of(2))
    assert as_parallel(globally, mesh_of(2)).view == "global"
    assert as_parallel(locally, mesh_of(2)).view == "device"
    wrapped = parallelize(train_step, mesh_of(2))
    assert as_parallel(wrapped) is wrapped
    with pytest.raises(ValueError, match="give the mesh once"):
        as_parallel(wrapped, mesh_of(4))
    with pytest.raises(ValueError, match="remainder='error' and was asked for 'pad'"):
        as_parallel(wrapped, remainder="pad")


def test_nonsense_is_refused_early(mesh_of):
    with pytest.raises(TypeError, match="a step is a function; got dict"):
        parallelize({}, mesh_of(2))
    with pytest.raises(ValueError, match="remainder='cut'"):
        parallelize(train_step, mesh_of(2), remainder="cut")
