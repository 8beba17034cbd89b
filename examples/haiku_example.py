"""Haiku: `transform_with_state`, with BatchNorm in the state and a key a step."""

import haiku as hk
import jax
import optax
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64
optimizer = optax.sgd(0.03, momentum=0.9)


@hk.transform_with_state
def network(x, is_training):
    x = hk.Conv2D(16, 3, with_bias=False)(x)
    x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
    x = hk.max_pool(jax.nn.relu(x), (2, 2, 1), (2, 2, 1), "VALID")
    x = hk.Flatten()(x)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.2, x)
    return hk.Linear(10)(x)


def train_step(state, batch, key):
    params, net_state, opt_state = state

    def loss_fn(params):
        logits, new = network.apply(params, net_state, key, batch["image"], True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), (logits, new)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, net_state)), grads = grad_fn(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return (params, net_state, opt_state), {"loss": loss, "accuracy": accuracy}


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        image = digits.images[rows, ..., None].astype("float32") / 16
        yield {"image": image, "label": digits.target[rows].astype("int32")}


def train(mesh, steps):
    image = next(batches(1))["image"]
    params, net_state = network.init(jax.random.key(0), image, True)
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
