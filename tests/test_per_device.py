"""The device view: a step that averages by itself, with global arrays in and out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same import assert_same
from test_parallel import OPTIMIZER, loss_of, make_batches, make_state, run, train_step

from lockstep.metrics import Mean
from lockstep.notices import reset
from lockstep.parallel import per_device
from lockstep.placement import shard_batch
from lockstep.replicas import ReplicaMismatch, check_replicas


def device_step(state, batch, axis_name="batch"):
    """The train step of the guides, nearly word for word."""
    params, opt_state, n = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.lax.pmean(grads, axis_name)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, n + 1), {"loss": loss}


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_n_devices_train_as_one(mesh_of, devices):
    want_state, want = run(jax.jit(train_step), make_batches())
    step = per_device(device_step, mesh_of(devices), axis_name="batch")
    state, losses = run(step, make_batches())
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert_same(state[0], want_state[0])
    assert step.compiles.count == 1
    check_replicas(state)


def test_outputs_lie_on_the_callers_mesh(mesh_of):
    mesh = mesh_of(4)
    step = per_device(device_step, mesh, axis_name="batch")
    state, metrics = step(make_state(), make_batches()[0])
    assert state[0]["w"].sharding.mesh == mesh
    assert metrics["loss"].sharding.mesh == mesh


def test_data_and_model_axes(mesh_of):
    want_state, want = run(jax.jit(train_step), make_batches())
    mesh = mesh_of(8, {"data": 4, "model": 2})
    state, losses = run(
        per_device(device_step, mesh, axis_name="batch"), make_batches()
    )
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    check_replicas(state)


def test_the_gradient_is_the_average_and_not_the_sum(mesh_of):
    """Case C2: w = 1, x = 0..3, loss = mean(w x): 1.5, not 6."""

    def step(w, x):
        grad = jax.grad(lambda w: (w * x).mean())(w)
        return w, jax.lax.pmean(grad, "data")

    out = per_device(step, mesh_of(4))(1.0, np.arange(4, dtype=np.float32))
    assert float(out[1]) == 1.5


def test_outputs_by_kind(mesh_of, caplog):
    reset()

    def step(w, x):
        return w + jax.lax.pmean(x.mean(), "data"), {
            "local": x.mean(),
            "mean": Mean(x.sum(), x.shape[0]),
            "rows": x,
            "reduced": jax.lax.psum(x.sum(), "data"),
            "count": (x > 2).sum(),
        }

    x = np.arange(8, dtype=np.float32)
    _, out = per_device(step, mesh_of(4))(0.0, x)
    assert float(out["local"]) == 3.5 and out["local"].shape == ()
    assert float(out["mean"].total) == 28 and int(out["mean"].count) == 8
    np.testing.assert_array_equal(out["rows"], x.reshape(4, 2))
    assert float(out["reduced"]) == 28
    assert float(out["count"]) == 5 / 4
    said = [
        r.getMessage() for r in caplog.records if "differs between" in r.getMessage()
    ]
    assert [s.split(" ")[0] for s in said] == ["metrics['count']", "metrics['local']"]


def test_one_key_is_folded_and_many_are_given_out(mesh_of):
    def draw(w, x, key):
        return w, jax.random.bits(key, x.shape)

    step = per_device(draw, mesh_of(4))
    x, key = np.ones(8, np.float32), jax.random.key(0)
    one = np.asarray(step(0.0, x, key)[1])
    assert len({tuple(row) for row in one}) == 4
    np.testing.assert_array_equal(
        one[2], jax.random.bits(jax.random.fold_in(key, 2), (2,))
    )
    keys = jax.random.split(key, 4)
    many = np.asarray(step(0.0, x, keys)[1])
    np.testing.assert_array_equal(many[3], jax.random.bits(keys[3], (2,)))
    raw = np.asarray(step(0.0, x, jax.random.PRNGKey(0))[1])
    np.testing.assert_array_equal(raw, one)
    raws = np.asarray(step(0.0, x, jax.random.split(jax.random.PRNGKey(0), 4))[1])
    np.testing.assert_array_equal(raws, many)


def test_uint32_data_is_no_key_unless_its_name_says_so(mesh_of):
    step = per_device(lambda w, x, table: (w, table * 2), mesh_of(2))
    table = np.array([1, 2], np.uint32)
    out = step(0.0, np.ones(2, np.float32), table)[1]
    np.testing.assert_array_equal(out, [[2, 4], [2, 4]])


@pytest.mark.parametrize("wrap", [lambda k: k, lambda k: jax.random.split(k)[0]])
def test_a_raw_key_is_known_by_its_use_under_any_name(mesh_of, wrap):
    def draw(w, x, k, table):
        noise = jax.jit(lambda k: jax.random.bits(wrap(k["dropout"]), (4,)))(k)
        return w, (noise, table + jax.random.key_data(jax.random.key(table[0])))

    table = np.array([1, 2], np.uint32)
    step = per_device(draw, mesh_of(4))
    raw = jax.random.PRNGKey(0)
    noise, tables = step(0.0, np.ones(4, np.float32), {"dropout": raw}, table)[1]
    for i in range(4):
        key = jax.random.fold_in(raw, i)
        np.testing.assert_array_equal(noise[i], jax.random.bits(wrap(key), (4,)))
        np.testing.assert_array_equal(tables[i], [1, 3])  # numbers are no key


@pytest.mark.parametrize("make", [jax.random.PRNGKey, jax.random.key])
def test_a_key_in_the_state_must_not_draw_the_same_on_all_devices(make, mesh_of):
    def step(fold):
        def run(s, x):
            new, key = jax.random.split(s["r"])
            noise = jax.random.normal(fold(key), x.shape)
            return {"w": s["w"] + jax.lax.pmean((x + noise).mean(), "data"), "r": new}

        return per_device(lambda s, x: (run(s, x), {}), mesh_of(4))

    state, x = {"w": 0.0, "r": make(0)}, np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"s\['r'\] is a random key inside the state"):
        step(lambda key: key)(state, x)
    by_device = lambda key: jax.random.fold_in(key, jax.lax.axis_index("data"))  # noqa: E731
    step(by_device)(state, x)


def test_an_optimizer_may_draw_the_same_noise_on_all_devices(mesh_of):
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    optimizer = optax.chain(noise, optax.sgd(0.1))

    def step(state, x):
        w, inner = state
        grad = jax.lax.pmean(x.mean(), "data")
        update, inner = optimizer.update(grad, inner, w)
        return (optax.apply_updates(w, update), inner), {}

    w, x = np.float32(0), np.arange(8, dtype=np.float32)
    found = [
        per_device(step, mesh_of(n))((w, optimizer.init(w)), x)[0][0] for n in (1, 4)
    ]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-6)


def test_a_wrong_number_of_keys_is_refused(mesh_of):
    step = per_device(lambda w, x, key: (w, x), mesh_of(4))
    with pytest.raises(
        ValueError, match=r"key holds keys of shape \(3,\); give one key"
    ):
        step(0.0, np.ones(4, np.float32), jax.random.split(jax.random.key(0), 3))


def test_a_step_that_reduces_nothing_is_refused_before_it_runs(mesh_of):
    with pytest.raises(
        ValueError, match=r"averages nothing over 'data'.*state\[0\]\['v'\]"
    ):
        per_device(train_step, mesh_of(4))(make_state(), make_batches()[0])


def test_a_forgotten_pmean_is_found_after_the_first_step(mesh_of):
    def forgets(state, batch):
        state, metrics = train_step(state, batch)
        return state, {"loss": jax.lax.pmean(metrics["loss"], "data")}

    mine = make_state()
    with pytest.raises(ReplicaMismatch, match=r"state\[0\]\['v'\]: devices? .* differ"):
        per_device(forgets, mesh_of(4))(mine, make_batches()[0])
    assert not mine[0]["w"].is_deleted()


def test_a_sum_that_the_analysis_cannot_prove_equal_passes(mesh_of):
    """A butterfly of ppermute: equal on all devices, though not seen to be."""

    def step(w, x):
        total = x.sum()
        for distance in (1, 2):
            pairs = [(i, i ^ distance) for i in range(4)]
            total = total + jax.lax.ppermute(total, "data", pairs)
        return w + total, None

    parallel = per_device(step, mesh_of(4))
    w, _ = parallel(0.0, np.arange(4, dtype=np.float32))
    assert float(w) == 6


def test_a_misspelt_axis_names_both(mesh_of):
    with pytest.raises(ValueError, match="uses the axis 'batch'.*axis_name='data'"):
        per_device(device_step, mesh_of(4))(make_state(), make_batches()[0])
    mesh = mesh_of(8, {"x": 4, "y": 2})
    with pytest.raises(ValueError, match="no axis 'data'; its axes are"):
        per_device(device_step, mesh)


def test_a_whole_batch_on_every_device_is_refused(mesh_of):
    with pytest.raises(ValueError, match="remainder='unsplit' gives every device"):
        per_device(device_step, mesh_of(4), remainder="unsplit")
    whole = shard_batch(np.ones(5, np.float32), mesh_of(4), remainder="unsplit")
    step = per_device(lambda w, x: (w, x), mesh_of(4))
    with pytest.raises(ValueError, match="x is whole on every device"):
        step(0.0, whole)


def test_a_plain_function_of_the_batch(mesh_of):
    out = per_device(lambda x: x**2, mesh_of(8), batch_argnums=0)(np.arange(16.0))
    np.testing.assert_array_equal(out, (np.arange(16.0) ** 2).reshape(8, 2))


def test_scan_over_a_zeros_carry_trains_unchanged(mesh_of):
    """Case A8: check_vma=True refuses this step."""

    def step(w, x):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(2), x)
        return w + jax.lax.psum(total, "data"), None

    w, _ = per_device(step, mesh_of(4))(jnp.zeros(2), np.ones((8, 2), np.float32))
    np.testing.assert_array_equal(w, [8, 8])
