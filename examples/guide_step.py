"""A step written for `jax.pmap`, which averages by itself, with global arrays.

The step is as pmap's guides teach it. Gone is what stood around it: no leading device
axis, no reshaping of batches, no replicating by hand, no splitting of keys.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64


class MLP(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        return nn.Dense(10)(x)


def train_step(state, batch, rng):
    images, labels = batch

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images, rngs={"dropout": rng})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    accuracy = (jnp.argmax(logits, axis=-1) == labels).mean()
    metrics = {
        "loss": lax.pmean(loss, axis_name="batch"),
        "accuracy": lax.pmean(accuracy, axis_name="batch"),
    }
    return state.apply_gradients(grads=grads), metrics


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        images = digits.images[rows, ..., None].astype("float32") / 16
        yield images, digits.target[rows].astype("int32")


def train(mesh, steps, dropout=0.2):
    """Dropout draws a mask a device, so the losses depend on how many there are."""
    model = MLP(dropout)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, next(batches(1))[0])["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)
    )
    step = ls.per_device(train_step, mesh, axis_name="batch")
    losses = []
    for i, batch in enumerate(ls.prefetch(batches(steps), step)):
        # One key: each device folds in its own number.
        state, metrics = step(state, batch, ls.step_key(jax.random.key(2), i))
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], state.params


if __name__ == "__main__":
    losses, _ = train(ls.make_mesh({"batch": -1}), steps=25)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {jax.device_count()} devices")
