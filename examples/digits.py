"""Train a small CNN on handwritten digits, on every device of this machine.

    make train

Real images (1,797 scanned digits that ship with scikit-learn), BatchNorm and dropout,
and not a line about devices in the model, the loss or the loop: the same program runs
on one CPU and on eight GPUs, and means the same training.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import lockstep as ls

EPOCHS = 30
BATCH = 256
HELD_OUT = 261  # images; the other 1,536 make six full batches


class CNN(nn.Module):
    """Two convolutions and a linear layer: [B, 8, 8, 1] -> [B, 10]."""

    @nn.compact
    def __call__(self, x, train):
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.Dropout(0.4, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


model = CNN()


def scores(logits, labels):
    """One loss and one hit or miss a row."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, logits.argmax(-1) == labels


def train_loss(params, model_state, batch, key):
    logits, model_state = model.apply(
        {"params": params, **model_state},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": key},
    )
    losses, hits = scores(logits, batch["label"])
    return losses, ({"accuracy": ls.Mean.of(hits)}, model_state)


def eval_step(state, batch):
    variables = {"params": state.params, **state.model_state}
    logits = model.apply(variables, batch["image"], train=False)
    losses, hits = scores(logits, batch["label"])
    real = batch["mask"]  # 0 in the rows that only fill up the last batch
    return {"loss": ls.Mean.of(losses, real), "accuracy": ls.Mean.of(hits, real)}


def load_rows():
    """The images to train on and those held out, shuffled once."""
    digits = load_digits()
    image = (digits.images[..., None] / 16).astype("float32")
    label = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(label))
    parts = order[HELD_OUT:], order[:HELD_OUT]
    return [{"image": image[rows], "label": label[rows]} for rows in parts]


def main():
    print(ls.describe_devices())
    mesh = ls.make_mesh()
    train_rows, held_out = load_rows()
    batches = ls.data.batches(train_rows, global_batch_size=BATCH, seed=0, mesh=mesh)
    valid = ls.data.batches(held_out, global_batch_size=BATCH, mesh=mesh)
    print(batches.plan)

    step = ls.make_train_step(train_loss, optax.adam(3e-3), model_state=True)
    check = ls.parallelize(eval_step, mesh, remainder="pad")
    variables = model.init(jax.random.key(0), held_out["image"], train=False)
    params = variables.pop("params")
    state = step.init(params, model_state=variables, key=jax.random.key(1))

    writers = ls.writers.JsonLines("run/metrics.jsonl"), ls.writers.TensorBoard("run")
    each_epoch = len(batches)
    trainer = ls.Trainer(
        step,
        mesh=mesh,
        callbacks=[
            ls.every(each_epoch, ls.callbacks.Evaluate(check, valid)),
            ls.every(each_epoch, ls.callbacks.Log(*writers)),
            ls.every(each_epoch, ls.callbacks.Plot("run/loss.png")),
            ls.callbacks.Progress(),
        ],
    )
    state = trainer.fit(state, batches, epochs=EPOCHS)

    ls.debug.check_replicas(state)
    print(f"replicas: equal on {mesh.size} devices, bit for bit")
    result = ls.evaluate(check, state, valid)
    print(f"held-out images: {result['accuracy']:.2%} of {HELD_OUT} right, each once")
    print("wrote run/metrics.jsonl, run/loss.png and TensorBoard events in run/")


if __name__ == "__main__":
    main()
