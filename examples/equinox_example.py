"""Equinox: the arrays of a model are the state, the rest of it stays outside.

BatchNorm needs `vmap` with an axis name; the name is the step's own and has nothing
to do with the devices.
"""

import equinox as eqx
import jax
import optax
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64
optimizer = optax.sgd(0.03, momentum=0.9)


class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d
    dropout: eqx.nn.Dropout
    dense: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 16, 3, padding=1, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(16, axis_name="rows", mode="batch")
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.dropout = eqx.nn.Dropout(0.2)
        self.dense = eqx.nn.Linear(16 * 16, 10, key=second)

    def __call__(self, x, state, key):
        x, state = self.norm(self.conv(x), state)
        x = self.pool(jax.nn.relu(x)).ravel()
        return self.dense(self.dropout(x, key=key)), state


model, net_state = eqx.nn.make_with_state(CNN)(jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, net_state, batch, key):
    model = eqx.combine(params, static)
    keys = jax.random.split(key, len(batch["label"]))
    apply = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="rows")
    logits, net_state = apply(batch["image"], net_state, keys)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return loss.mean(), (logits, net_state)


def train_step(state, batch, key):
    params, net_state, opt_state = state
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, net_state)), grads = grad_fn(params, net_state, batch, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return (params, net_state, opt_state), {"loss": loss, "accuracy": accuracy}


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        image = digits.images[rows, None].astype("float32") / 16
        yield {"image": image, "label": digits.target[rows].astype("int32")}


def train(mesh, steps):
    state = params, net_state, optimizer.init(params)
    step = ls.parallelize(train_step, mesh)
    losses = []
    for i, batch in enumerate(ls.prefetch(batches(steps), step)):
        state, metrics = step(state, batch, ls.step_key(jax.random.key(1), i))
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], state[0]


if __name__ == "__main__":
    losses, _ = train(ls.make_mesh(), steps=25)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {jax.device_count()} devices")
