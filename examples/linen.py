"""Flax Linen: `TrainState`, BatchNorm and dropout, as Flax's own guides write them."""

from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def train_step(state, batch):
    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(state.key, state.step)},
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, updates)), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return state, {"loss": loss, "accuracy": accuracy}


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        image = digits.images[rows, ..., None].astype("float32") / 16
        yield {"image": image, "label": digits.target[rows].astype("int32")}


def train(mesh, steps):
    model = CNN()
    variables = model.init(jax.random.key(0), next(batches(1))["image"], train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
        tx=optax.sgd(0.03, momentum=0.9),
    )
    step = ls.parallelize(train_step, mesh)
    losses = []
    for batch in ls.prefetch(batches(steps), step):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], state.params


if __name__ == "__main__":
    losses, _ = train(ls.make_mesh(), steps=25)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {jax.device_count()} devices")
