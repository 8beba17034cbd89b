import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.parallel import as_parallel, parallelize, per_device
from lockstep.placement import shard_batch
from lockstep.step import make_train_step

RNG = np.random.default_rng(0)
W = {"w": jnp.asarray(RNG.normal(size=3), jnp.float32)}


def batch_of(rows, dtype=np.float32):
    x = RNG.normal(size=(rows, 3)) * 10
    return {"x": x.astype(dtype), "y": RNG.normal(size=rows).astype(np.float32)}


def update(w, loss):
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.001 * g, w, grads), {"loss": value}


def errors(w, batch):
    return (batch["x"].astype(jnp.float32) @ w["w"] - batch["y"]) ** 2


def masked(w, batch):
    m = batch["mask"]
    return update(w, lambda w: (errors(w, batch) * m).sum() / m.sum())


def forgetful(w, batch):
    return update(w, lambda w: errors(w, batch).mean())


def one_device(w, batch):
    return update(w, lambda w: errors(w, batch).mean())


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_padded_rows_change_nothing(mesh_of, rows):
    batch = batch_of(rows)
    want, want_metrics = jax.jit(one_device)(W, batch)
    step = parallelize(masked, mesh_of(8), remainder="pad")
    got, metrics = step(W, batch)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)


def test_one_compile_for_full_and_ragged_batches(mesh_of):
    step = parallelize(masked, mesh_of(8), remainder="pad")
    w = W
    for rows in (16, 16, 5, 16, 1):
        w, _ = step(w, batch_of(rows))
    assert step.compiles.count == 1


def test_the_mask_multiplies_one_that_is_there(mesh_of):
    batch = {**batch_of(5), "mask": np.array([1, 0, 1, 1, 1], bool)}
    kept = {k: v[batch["mask"]] for k, v in batch.items() if k != "mask"}
    want, _ = jax.jit(one_device)(W, kept)
    got, _ = parallelize(masked, mesh_of(4), remainder="pad")(W, batch)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)


def test_the_mask_may_have_another_name(mesh_of):
    step = parallelize(
        lambda w, batch: (w, (batch["valid"] * batch["x"]).sum()),
        mesh_of(4),
        remainder="pad",
        mask_name="valid",
    )
    assert float(step(0.0, {"x": np.ones(5, np.float32)})[1]) == 5


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_forgotten_mask_is_refused(mesh_of, rows, dtype):
    step = parallelize(forgetful, mesh_of(8), remainder="pad")
    mine = jax.tree.map(jnp.copy, W)
    with pytest.raises(ValueError, match="padding leaks into the results: output"):
        step(mine, batch_of(rows, dtype))
    assert not mine["w"].is_deleted()


def test_rows_that_meet_are_refused(mesh_of):
    def batch_norm(w, batch):
        m = batch["mask"]
        x = (batch["x"] - batch["x"].mean(0)) / (batch["x"].std(0) + 1e-3)
        loss = lambda w: (((x @ w["w"]) ** 2) * m).sum() / m.sum()  # noqa: E731
        return update(w, loss)

    def in_batch_negatives(w, batch):
        m = batch["mask"]

        def loss(w):
            logits = (batch["x"] * w["w"]) @ batch["x"].T / 100
            rows = -jax.nn.log_softmax(logits)[jnp.arange(len(m)), jnp.arange(len(m))]
            return (rows * m).sum() / m.sum()

        return update(w, loss)

    for step in (batch_norm, in_batch_negatives):
        with pytest.raises(ValueError, match="BatchNorm, in-batch negatives"):
            parallelize(step, mesh_of(4), remainder="pad")(W, batch_of(5))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["vectors", "numbers"])
def test_rows_that_meet_as_unit_vectors_or_by_number_are_refused(mesh_of, kind, rows):
    """One common factor is not seen by the first, one common row by the second."""
    table = jnp.asarray(RNG.normal(size=(9, 3)), jnp.float32)

    def step(w, batch):
        x = batch["x"] if kind == "vectors" else table[batch["x"]]
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        scores = jax.nn.log_softmax((x * w["w"]) @ x.T)
        return w, {"loss": -(jnp.diag(scores) * batch["mask"]).sum()}

    x = batch_of(rows)["x"] if kind == "vectors" else np.arange(4, 4 + rows)
    with pytest.raises(ValueError, match="padding leaks into the results: output"):
        parallelize(step, mesh_of(8), remainder="pad")(W, {"x": x})


def test_the_fillings_stay_valid(mesh_of):
    """A length of 0 would make 0/0 in a row that the mask then cannot take away."""

    def step(w, batch):
        means = batch["x"].sum(1) / batch["length"]
        return w, (means * batch["mask"]).sum()

    batch = {"x": np.ones((3, 4), np.float32), "length": np.array([1, 2, 4])}
    _, total = parallelize(step, mesh_of(8), remainder="pad")(W, batch)
    assert float(total) == 7


def test_the_check_runs_once_and_on_copies(mesh_of):
    runs = []
    step = parallelize(masked, mesh_of(4), remainder="pad")
    run = step._run
    step._run = lambda placed: (runs.append(1), run(placed))[1]
    w, _ = step(W, batch_of(8))
    w, _ = step(w, batch_of(5))
    w, _ = step(w, batch_of(3))
    assert len(runs) == 3 + 3


def test_a_batch_without_a_place_for_the_mask_is_refused(mesh_of):
    step = parallelize(lambda w, b: (w, b[0].sum()), mesh_of(4), remainder="pad")
    with pytest.raises(TypeError, match="make it a dict"):
        step(0.0, (np.ones(5, np.float32),))


def test_the_device_view_pads_as_well(mesh_of):
    def step(w, batch):
        m = batch["mask"]
        count = jax.lax.psum(m.sum(), "data")
        loss = lambda w: (errors(w, batch) * m).sum()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(w)
        value, grads = jax.lax.psum((value, grads), "data")
        new = jax.tree.map(lambda p, g: p - 0.001 * g / count, w, grads)
        return new, {"loss": value / count}

    batch = batch_of(5)
    want, want_metrics = jax.jit(one_device)(W, batch)
    got, metrics = per_device(step, mesh_of(8), remainder="pad")(W, batch)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key, n: jax.random.bernoulli(key, 0.5, (n,)),
        lambda key, n: jax.random.gamma(key, jnp.ones(n)),
    ],
)
def test_numbers_drawn_by_each_device_are_not_those_of_one(mesh_of, draw):
    """So a padded step that draws has nothing to be held against."""

    def step(w, batch, key):
        m, count = batch["mask"], jax.lax.psum(batch["mask"].sum(), "data")
        kept = batch["x"][:, 0] * draw(key, len(m)) * m
        return w, {"loss": jax.lax.psum(kept.sum(), "data") / count}

    run = per_device(step, mesh_of(4), remainder="pad")
    _, metrics = run(0.0, batch_of(5), jax.random.key(0))
    assert np.isfinite(float(metrics["loss"]))


def test_the_largest_losses_leak_though_the_filling_is_none_of_them(mesh_of):
    def hardest(w, batch):  # of 5 rows, the two with the largest losses
        def loss(w):
            values = errors(w, batch)
            chosen = values >= jnp.sort(values)[-2]
            m = batch["mask"]
            return (values * chosen * m).sum() / m.sum()

        return update(w, loss)

    x = np.array([[5.0], [4.0], [3.0], [2.0], [1.0]], np.float32) * np.ones(3, "f")
    batch = {"x": x, "y": np.zeros(5, np.float32)}
    step = parallelize(hardest, mesh_of(4), remainder="pad")
    with pytest.raises(ValueError, match="padding leaks"):
        step({"w": jnp.ones(3)}, batch)


def test_what_overflows_in_a_masked_row_is_no_leak(mesh_of):
    def step(w, batch):
        return masked(w, {**batch, "y": 0 * jnp.log1p(-batch["x"][:, 0])})

    batch = batch_of(5) | {"x": RNG.uniform(0.6, 0.9, (5, 3)).astype(np.float32)}
    _, metrics = parallelize(step, mesh_of(4), remainder="pad")(W, batch)
    assert np.isfinite(metrics["loss"])


def test_a_placed_padded_batch_is_checked_whatever_came_before(mesh_of):
    mesh = mesh_of(4)
    step = parallelize(forgetful, mesh)
    placed = [shard_batch(batch_of(n), mesh, remainder="pad") for n in (8, 8, 7)]
    w, _ = step(W, placed[0])
    w, _ = step(w, placed[1])
    with pytest.raises(ValueError, match="padding leaks"):
        step(w, placed[2])


def test_a_leak_that_needs_a_mixed_shard_is_found_when_there_is_one(mesh_of):
    """Weighing shards by their real rows hides a local mean, until a shard is mixed."""

    def step(w, batch):
        m = batch["mask"]
        count = jax.lax.psum(m.sum(), "data")
        value, grads = jax.value_and_grad(lambda w: errors(w, batch).mean())(w)
        share = m.sum() / count
        value, grads = jax.lax.psum((value * share, tree_scale(grads, share)), "data")
        return jax.tree.map(lambda p, g: p - 0.001 * g, w, grads), {"loss": value}

    parallel = per_device(step, mesh_of(4), remainder="pad")
    w, _ = parallel(W, batch_of(8))
    w, _ = parallel(w, batch_of(4))  # two full shards, two of padding: exact
    with pytest.raises(ValueError, match="padding leaks"):
        parallel(w, batch_of(5))


def tree_scale(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


def static_rows(w, batch):
    """The mask is applied, and the sum divided by the number of all rows."""
    return update(w, lambda w: jnp.mean(errors(w, batch) * batch["mask"]))


def test_dividing_by_all_rows_is_refused(mesh_of):
    with pytest.raises(ValueError, match="padding changes the results: .* not by the"):
        parallelize(static_rows, mesh_of(8), remainder="pad")(W, batch_of(5))


def test_it_is_found_by_the_metrics_of_an_evaluation_too(mesh_of):
    def step(w, batch):
        return {"error": jnp.mean(errors(w, batch) * batch["mask"])}

    with pytest.raises(ValueError, match=r"output\['error'\] is .* and not"):
        parallelize(step, mesh_of(8), remainder="pad")(W, batch_of(7))


def test_a_mean_of_the_devices_masked_means_is_refused(mesh_of):
    def step(w, batch):
        m = batch["mask"]
        loss = lambda w: (errors(w, batch) * m).sum() / jnp.maximum(m.sum(), 1)  # noqa: E731
        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(w), "data")
        new = jax.tree.map(lambda p, g: p - 0.001 * g, w, grads)
        return new, {"loss": value}

    with pytest.raises(ValueError, match="padding changes the results"):
        per_device(step, mesh_of(8), remainder="pad")(W, batch_of(13))


def test_a_loss_of_make_train_step_that_counts_all_rows_is_refused(mesh_of):
    def loss(w, batch):
        return errors(w, batch) + 100 * (w["w"] ** 2).sum() / len(batch["y"])

    step = make_train_step(loss, optax.adam(1e-2))
    with pytest.raises(ValueError, match="padding changes the results"):
        parallelize(step, mesh_of(8), remainder="pad")(step.init(W), batch_of(5))


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_leaves_without_signal_and_noise_do_not_look_like_padding(mesh_of, axis_name):
    """Adam makes +-lr of a gradient that is nothing but rounding."""

    def loss(p, batch):
        x = batch["x"] @ p["a"] + p["no_signal"]
        return ((x - x.mean(1, keepdims=True)) ** 2).sum(1)

    params = {"a": jnp.asarray(RNG.normal(size=(3, 16)), jnp.float32)}
    params["no_signal"] = jnp.ones(())
    step = make_train_step(loss, optax.adam(1e-2), axis_name=axis_name)
    run = as_parallel(step, mesh_of(8), remainder="pad")
    state, metrics = run(step.init(params), batch_of(13))
    assert float(metrics["loss"]) > 0
