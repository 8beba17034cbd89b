"""Losses in the device view whose rows meet: refused before they train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls
from lockstep.parallel.independence.check import RowsCheck
from lockstep.parallel.independence.flow import Follow
from lockstep.parallel.independence.kinds import Met, Rows
from lockstep.parallel.independence.trial import Trial

_RNG = np.random.default_rng(0)
BATCH = {
    "x": _RNG.normal(size=(16, 3)).astype(np.float32),
    "y": _RNG.integers(4, size=16),
    "count": np.ones(16, np.int32),
}


def start():
    return {"w": np.full((3, 4), 0.1, np.float32)}


def losses_of(params, batch):
    logits = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def call(loss, mesh, batch=BATCH, key=None, **options):
    """The first step of a loss in the device view."""
    step = ls.make_train_step(loss, optax.sgd(0.1), axis_name="data", **options)
    run = ls.per_device(step, mesh)
    return run(step.init(start(), key=key), batch)


def negatives(params, batch):
    a = batch["x"] @ params["w"]
    own = jnp.arange(len(a))
    return optax.softmax_cross_entropy_with_integer_labels(a @ a.T, own)


def normalised(params, batch):
    hidden = batch["x"] @ params["w"]
    return jnp.mean(jnp.tanh(hidden - hidden.mean(0)) * batch["x"][:, :1])


MEETING = {
    "in-batch negatives": (negatives, "`dot_general`"),
    "the greatest": (lambda p, b: losses_of(p, b).max(), "`reduce_max`"),
    "normalised over rows": (normalised, "`sub`"),
    "sorted over rows": (
        lambda p, b: jnp.sort(losses_of(p, b)) * jnp.arange(len(b["y"])),
        "`sort`",
    ),
    "cumsum over rows": (lambda p, b: jnp.cumsum(losses_of(p, b)), "`cumsum`"),
    "by place": (lambda p, b: losses_of(p, b) * jnp.arange(len(b["y"])), "`mul`"),
    "mean of means": (
        lambda p, b: jnp.sum(losses_of(p, b) * b["count"]) / jnp.sum(b["count"]),
        "`div`",
    ),
}


@pytest.mark.parametrize("loss, where", MEETING.values(), ids=MEETING)
def test_rows_that_meet_are_refused_with_the_line(loss, where, mesh_of):
    with pytest.raises(ValueError, match="the loss is no mean of indep") as caught:
        call(loss, mesh_of(4))
    text = str(caught.value)
    assert f"rows meet in {where} at" in text and "test_independence.py" in text
    assert "all_gather(x, 'data', tiled=True)" in text and "rows='local'" in text


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: losses_of(p, b).sum(),
        lambda p, b: ls.Mean(losses_of(p, b).sum(), 1),
    ],
    ids=["scalar", "Mean"],
)
def test_a_sum_is_no_mean(loss, mesh_of):
    with pytest.raises(ValueError, match=r"loss is a sum .* give \S+ on one device"):
        call(loss, mesh_of(4))


def by_gamma(params, batch, key):
    """Draws whose distribution is each row's own."""
    return jax.random.gamma(key, 1 + losses_of(params, batch))


@pytest.mark.parametrize(
    "loss, what",
    [
        (lambda p, b, key: by_gamma(p, b, key).sum(), "a sum over its rows"),
        (
            lambda p, b, key: (
                losses_of(p, b) * jax.random.gamma(key, 1.0 + jnp.arange(len(b["y"])))
            ),
            "rows meet in `mul`",
        ),
    ],
    ids=["sum", "by place"],
)
def test_draws_do_not_hide_what_they_are_made_of(loss, what, mesh_of):
    with pytest.raises(ValueError, match=what):
        call(loss, mesh_of(4), key=jax.random.key(0))


def test_a_generator_mixes_all_words_of_its_key():
    def draw(words):
        return jax.lax.rng_bit_generator(words, (4,))[1]

    jaxpr = jax.make_jaxpr(draw)(jnp.zeros(4, "uint32")).jaxpr
    (kind,) = Follow(4, "data", 2)(jaxpr, [Rows(0)])
    assert isinstance(kind, Met)


@pytest.mark.parametrize("rows", [4, 8])
def test_one_row_a_device_is_no_way_round(rows, mesh_of):
    batch = jax.tree.map(lambda x: x[:rows], BATCH)
    with pytest.raises(ValueError, match="the loss is no mean"):
        call(negatives, mesh_of(4), batch)


def test_metrics_are_looked_at_too(mesh_of):
    def loss(params, batch):
        each = losses_of(params, batch)
        return each, {"fine": each.mean(), "worst": {"loss": each.max()}}

    with pytest.raises(ValueError, match="metric 'worst/loss' is no mean of indep"):
        call(loss, mesh_of(2))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_random_numbers_do_not_hide_it(key, mesh_of):
    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.9, (len(batch["y"]), 1))
        return negatives(params, {**batch, "x": batch["x"] * kept})

    with pytest.raises(ValueError, match="rows meet in `dot_general`"):
        call(loss, mesh_of(4), key=key)


def test_a_mask_that_is_left_out(mesh_of):
    batch = {**BATCH, "mask": np.ones(16, bool)}
    with pytest.raises(ValueError, match="the loss is a mean that leaves the mask out"):
        call(lambda p, b: losses_of(p, b).mean(), mesh_of(4), batch)


def test_weights_that_are_fractions(mesh_of):
    def loss(params, batch):
        weights = batch["mask"]
        total = jnp.sum(losses_of(params, batch) * weights)
        return total / jnp.maximum(weights.sum(), 1.0)

    mesh, draw = mesh_of(8), np.random.default_rng(1)
    call(loss, mesh, BATCH | {"mask": (np.arange(16) % 3 > 0).astype(np.float32)})
    weights = draw.uniform(0, 0.5, 16).astype(np.float32)
    with pytest.raises(ValueError, match="is no mean of independent rows|weigh"):
        call(loss, mesh, BATCH | {"mask": weights})


def test_a_second_try_is_refused_as_well(mesh_of):
    step = ls.make_train_step(negatives, optax.sgd(0.1), axis_name="data")
    run, state = ls.per_device(step, mesh_of(4)), step.init(start())
    for _ in range(2):
        with pytest.raises(ValueError, match="rows meet"):
            run(state, BATCH)


def test_local_rows_may_be_meant(mesh_of):
    _, metrics = call(negatives, mesh_of(4), rows="local")
    assert np.isfinite(float(metrics["loss"]))


def test_the_option_is_for_the_device_view():
    with pytest.raises(ValueError, match="in the global view the loss sees the whole"):
        ls.make_train_step(negatives, optax.sgd(0.1), rows="local")
    with pytest.raises(ValueError, match="rows='all' must be 'local' or None"):
        ls.make_train_step(negatives, optax.sgd(0.1), axis_name="data", rows="all")


def test_nothing_meets_on_one_device(mesh_of):
    call(negatives, mesh_of(1))


def gathered(params, batch):
    a = batch["x"] @ params["w"]
    others = jax.lax.all_gather(a, "data", tiled=True)
    own = jnp.arange(len(a)) + len(a) * jax.lax.axis_index("data")
    return optax.softmax_cross_entropy_with_integer_labels(a @ others.T, own)


def paired(params, batch):
    """Two rows for the model from each row of the batch, as preferences have."""
    scores = (jnp.concatenate([batch["x"], -batch["x"]]) @ params["w"]).sum(1)
    better, worse = jnp.split(scores, 2)
    return -jax.nn.log_sigmoid(better - worse)


def shifted(params, batch):
    logits = batch["x"] @ params["w"]
    logits = logits - logits.max()  # which a softmax does not notice
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def in_groups(params, batch):
    """Each two neighbours are samples of one question."""
    groups = losses_of(params, batch).reshape(-1, 2)
    return jnp.abs(groups - groups.mean(1, keepdims=True)).mean()


TRIED = {
    "gathered negatives": gathered,
    "pairs": paired,
    "a shift that cancels": shifted,
    "groups inside a shard": in_groups,
    "own index": lambda p, b: (
        -jax.nn.log_softmax(b["x"] @ p["w"])[jnp.arange(len(b["y"])), b["y"]]
    ),
    "a loop over rows": lambda p, b: jax.lax.map(
        lambda row: jnp.sum((row @ p["w"]) ** 2), b["x"]
    ),
}


@pytest.mark.parametrize("loss", TRIED.values(), ids=TRIED)
def test_what_cannot_be_proved_is_tried(loss, mesh_of, monkeypatch):
    tried = []
    gaps = Trial.gaps
    monkeypatch.setattr(Trial, "gaps", lambda self: tried.append(1) or gaps(self))
    call(loss, mesh_of(4))
    assert tried


def recurrent(params, batch):
    def cell(state, x):
        return jnp.tanh(state + x[:, None] * params["w"][0]), None

    return jax.lax.scan(cell, jnp.zeros((len(batch["y"]), 4)), batch["x"].T)[0].mean()


def centred(params, batch):
    hidden = batch["x"] @ params["w"]
    hidden -= jax.lax.pmean(hidden.mean(0), "data")
    return (hidden**2).mean()


def tokens(params, batch):
    x = jnp.stack([batch["x"], batch["x"] + 1], 1)  # [B, T, 3]
    q = x @ params["w"]
    scores = jnp.where(jnp.tri(2, dtype=bool), q @ q.swapaxes(1, 2), -1e9)
    out = (jax.nn.softmax(scores) @ q).reshape(-1, 4)
    labels = jnp.repeat(batch["y"], 2)
    return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()


def convolved(params, batch):
    image = batch["x"].reshape(-1, 1, 3, 1)
    kernel = params["w"].reshape(1, 3, 1, 4)
    out = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return out.mean((1, 2)).max(1)


def dropped(params, batch, key):
    x = batch["x"] * jax.random.bernoulli(key, 0.9, batch["x"].shape)
    return losses_of(params, {**batch, "x": x}).mean()


def by_device_key(params, batch, key):
    """Bits that XLA draws by itself."""
    words = jnp.tile(jax.random.key_data(key), 2)
    _, bits = jax.lax.rng_bit_generator(words, batch["x"].shape)
    return losses_of(params, {**batch, "x": batch["x"] + (bits >> 31)})


def with_positions(params, batch):
    """One position a feature, the same for all rows."""
    place = jnp.broadcast_to(jnp.arange(3.0), batch["x"].shape)
    return losses_of(params, {**batch, "x": batch["x"] + jnp.sin(place)})


def by_row_key(params, batch):
    keys = jax.vmap(jax.random.key)(batch["y"])
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    return losses_of(params, {**batch, "x": batch["x"] + noise})


def trained(params, batch):
    """A regulariser, an accuracy and a count."""
    logits = batch["x"] @ params["w"]
    right = logits.argmax(-1) == batch["y"]
    loss = losses_of(params, batch).mean() + 0.1 * (params["w"] ** 2).sum()
    return loss, {"accuracy": right.mean(), "right": ls.Mean.of(right)}


PROVED = {
    "recurrent": recurrent,
    "centred over devices": centred,
    "tokens": tokens,
    "convolved": convolved,
    "dropped": dropped,
    "gamma": lambda p, b, key: by_gamma(p, b, key).mean(),
    "the bits of a generator": by_device_key,
    "positions": with_positions,
    "a key a row": by_row_key,
    "trained": trained,
    "vmap": lambda p, b: jax.vmap(lambda x: ((x @ p["w"]) ** 2).mean())(b["x"]),
    "Mean": lambda p, b: ls.Mean.of(losses_of(p, b)),
    "weights": lambda p, b: ls.Mean.of(losses_of(p, b), b["count"]),
    "dot": lambda p, b: ls.Mean(losses_of(p, b) @ b["count"], b["count"].sum()),
    "embedding": lambda p, b: p["w"].T[b["y"]].sum(1) ** 2,
    "remat": lambda p, b: jax.checkpoint(losses_of)(p, b).mean(),
}


@pytest.mark.parametrize("loss", PROVED.values(), ids=PROVED)
def test_usual_losses_are_proved_without_a_run(loss, mesh_of, monkeypatch):
    monkeypatch.delattr(Trial, "gaps")
    takes_key = loss.__code__.co_argcount == 3
    key = jax.random.key(0) if takes_key else None
    call(loss, mesh_of(4), key=key)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_padding_and_a_scalar_that_reads_the_mask(accumulate, mesh_of, monkeypatch):
    def loss(params, batch):
        each = losses_of(params, batch) * batch["mask"]
        return each.sum() / jnp.maximum(batch["mask"].sum(), 1)

    monkeypatch.delattr(Trial, "gaps")
    step = ls.make_train_step(
        loss, optax.sgd(0.1), axis_name="data", accumulate=accumulate
    )
    batch = jax.tree.map(lambda x: x[:13], BATCH)
    run = ls.per_device(step, mesh_of(4), remainder="pad")
    _, got = run(step.init(start()), batch)
    assert float(got["loss"]) == pytest.approx(losses_of(start(), batch).mean())


def test_a_loss_that_fails_elsewhere_is_left_alone(mesh_of):
    def loss(params, batch):
        if len(batch["y"]) != 4:
            raise RuntimeError("four rows, as on each device")
        return negatives(params, batch)

    call(loss, mesh_of(4))


def test_an_axis_of_the_mesh_beside_the_rows(mesh_of):
    mesh = mesh_of(8, {"model": 2, "data": 4})
    with pytest.raises(ValueError, match="rows meet in `dot_general`"):
        call(negatives, mesh)
    call(shifted, mesh)


def test_it_is_looked_at_once(mesh_of, monkeypatch):
    looks = []
    unproven = RowsCheck.unproven
    monkeypatch.setattr(
        RowsCheck, "unproven", lambda *a: looks.append(1) or unproven(*a)
    )
    step = ls.make_train_step(losses_of, optax.sgd(0.1), axis_name="data")
    run = ls.per_device(step, mesh_of(4))
    state, _ = run(step.init(start()), BATCH)
    run(state, BATCH)
    assert len(looks) == 1


def balanced(params, batch):
    """With a loss for the balance of experts, too small for a trial to show."""
    gates = jax.nn.softmax(batch["x"] @ params["w"] * 0.1)
    share = jax.nn.one_hot(gates.argmax(-1), 4).mean(0)
    return losses_of(params, batch).mean() + 0.001 * (share * gates.mean(0)).sum()


def in_layers(params, batch):
    """The same, added up in a scan."""

    def layer(total, scale):
        return total + balanced(jax.tree.map(lambda w: w * scale, params), batch), None

    return jax.lax.scan(layer, 0.0, jnp.ones(2))[0]


def counted(params, batch):
    return losses_of(params, batch) * batch["count"], batch["count"]


def only_where_any_counts(params, batch):
    each, count = counted(params, batch)
    return jnp.where(count.sum() > 0, each.sum() / count.sum(), 0.0)


UNEVEN = {
    "divided by a sum": lambda p, b: counted(p, b)[0].sum() / b["count"].sum(),
    "or by 1": lambda p, b: counted(p, b)[0].sum() / jnp.maximum(b["count"].sum(), 1),
    "or by nearly 0": lambda p, b: counted(p, b)[0].sum() / (b["count"].sum() + 1e-8),
    "mean(where=)": lambda p, b: losses_of(p, b).mean(where=b["count"] > 0),
    "where any counts": only_where_any_counts,
    "beside what rows meet in": lambda p, b: (
        0.001 * negatives(p, b).mean() + counted(p, b)[0].sum() / b["count"].sum()
    ),
    "a product of means": balanced,
    "products in a scan": in_layers,
    "a square of means": lambda p, b: ((b["x"] @ p["w"]).mean(0) ** 2).sum(),
    "an entropy of means": lambda p, b: (
        losses_of(p, b).mean()
        - 1e-4 * jnp.log(jax.nn.softmax(b["x"] @ p["w"]).mean(0)).mean()
    ),
    "a dot product of means": lambda p, b: (
        (b["x"] @ p["w"]).mean(0) @ jnp.tanh(b["x"] @ p["w"]).mean(0)
    ),
}


@pytest.mark.parametrize("loss", UNEVEN.values(), ids=UNEVEN)
def test_uneven_parts_are_seen_without_a_run(loss, mesh_of, monkeypatch):
    """The rows at hand may all count, and those of a later batch not."""
    monkeypatch.delattr(Trial, "gaps")
    with pytest.raises(ValueError, match=r"no mean of indep.*(a sum div|a prod|bends)"):
        call(loss, mesh_of(4))


def test_a_count_of_at_least_one_is_refused(mesh_of):
    def loss(params, batch):
        each, count = counted(params, batch)
        return ls.Mean(each.sum(), jnp.maximum(count.sum(), 1))

    with pytest.raises(ValueError, match="Give Mean the plain sum, which may be 0"):
        call(loss, mesh_of(4))


@pytest.mark.parametrize("full", [True, False])
def test_a_count_against_a_division_by_zero_is_fine(full, mesh_of, monkeypatch):
    def loss(params, batch):
        each, count = counted(params, batch)
        return ls.Mean(each.sum(), count.sum() + 1e-8)

    monkeypatch.delattr(Trial, "gaps")
    count = np.ones(16, np.int32) if full else np.arange(16) // 8
    _, metrics = call(loss, mesh_of(4), {**BATCH, "count": count})
    expected = np.average(losses_of(start(), BATCH), weights=count)
    assert float(metrics["loss"]) == pytest.approx(expected)


def by_square_root(params, batch):
    """Unequal counts, and a form that is not read from the jaxpr."""
    each, count = losses_of(params, batch), batch["valid"]
    total = jnp.sum(each[:, None] * count, dtype=jnp.float32)
    return total / jnp.sqrt(jnp.sum(count, dtype=jnp.float32) ** 2)


@pytest.mark.parametrize(
    "valid",
    [np.ones((16, 5), bool), np.arange(16)[:, None] // 2 % 2 * np.ones((16, 5))],
    ids=["all count", "none in some parts"],
)
def test_the_trial_leaves_some_tokens_out(valid, mesh_of):
    with pytest.raises(ValueError, match="rows meet in `sqrt`|on one device, and nan"):
        call(by_square_root, mesh_of(8), {**BATCH, "valid": valid})
