"""Flax NNX: modules that change in place, and a step that returns what it changed.

The dropout key and the BatchNorm statistics live in the module. Only what the step
returns is kept: `(model, optimizer)` first, then the metrics.
"""

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.dense = nnx.Linear(16 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        return self.dense(self.dropout(x))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return loss.mean(), logits


def train_step(state, batch):
    model, optimizer = state
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    optimizer.update(model, grads)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return (model, optimizer), {"loss": loss, "accuracy": accuracy}


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        image = digits.images[rows, ..., None].astype("float32") / 16
        yield {"image": image, "label": digits.target[rows].astype("int32")}


def train(mesh, steps):
    model = CNN(nnx.Rngs(params=0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.03, momentum=0.9), wrt=nnx.Param)
    state = model, optimizer
    step = ls.parallelize(train_step, mesh)
    losses = []
    for batch in ls.prefetch(batches(steps), step):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], nnx.state(state[0], nnx.Param)


if __name__ == "__main__":
    losses, _ = train(ls.make_mesh(), steps=25)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {jax.device_count()} devices")
