"""Small trainings whose numbers must not depend on processes and devices."""

import jax
import numpy as np
import optax

import lockstep as ls

ROWS = 70  # batches of 16 leave 6: unequal parts on 2 and on 4 processes


def rows():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": (x @ [1, 2, 3, 4] + 0.1).astype(np.float32)}


def params():
    return {"w": np.zeros(4, np.float32), "b": 0.0}


def loss(p, batch):
    return (batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2


def batches(mesh):
    return ls.data.batches(rows(), global_batch_size=16, seed=0, mesh=mesh)


def plain_step(state, batch):
    """An unchanged single-device step."""
    p, opt_state = state

    def mean(p):
        return loss(p, batch).mean()

    value, grads = jax.value_and_grad(mean)(p)
    updates, opt_state = SGD.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), {"loss": value}


SGD = optax.sgd(0.05)


def plain_losses(mesh):
    """A bare loop over an unchanged step; the short last batch lies on every device."""
    step = ls.parallelize(plain_step, mesh, remainder="unsplit")
    state = ls.replicate((params(), SGD.init(params())), mesh)
    found = []
    for batch in ls.prefetch(batches(mesh), step):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    ls.debug.check_replicas(state)
    return found


def trainer_losses(mesh, *, axis_name=None, accumulate=1, fixed_shards=None):
    """The Trainer over two epochs, with padding in their last batches."""
    step = ls.make_train_step(
        loss,
        optax.adam(0.01),
        axis_name=axis_name,
        accumulate=accumulate,
        fixed_shards=fixed_shards,
    )
    wrap = ls.parallelize if axis_name is None else ls.per_device
    trainer = ls.Trainer(wrap(step, mesh, remainder="pad"))
    run = trainer.steps(step.init(params()), batches(mesh), epochs=2)
    return [info.scalars()["loss"] for info in run]


def evaluated(mesh, remainder):
    """Metrics and outputs for exactly the rows there are."""
    weights = {"w": np.ones(4, np.float32), "b": 0.5}

    def metrics(p, batch):
        return {"loss": loss(p, batch)}

    def outputs(p, batch):
        return batch["x"] @ p["w"]

    data = ls.data.batches(rows(), global_batch_size=16, mesh=mesh)
    found = ls.evaluate(metrics, weights, data, mesh=mesh, remainder=remainder)
    out = ls.predict(outputs, weights, data, mesh=mesh, remainder=remainder)
    return [found["loss"], *map(float, out)]


def all_numbers(mesh):
    """Every training's numbers, by name."""
    return {
        "plain": plain_losses(mesh),
        "global": trainer_losses(mesh, accumulate=2),
        "device": trainer_losses(mesh, axis_name="data"),
        "fixed": trainer_losses(mesh, axis_name="data", fixed_shards=4),
        "unsplit": evaluated(mesh, "unsplit"),
        "pad": evaluated(mesh, "pad"),
    }
