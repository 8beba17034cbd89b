"""Plain JAX and Optax: an unchanged single-device step on every device.

BatchNorm and dropout are written by hand, to show that there is nothing to change in
them: the step sees the whole batch, so its mean is the mean over all devices.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import lockstep as ls

BATCH = 64
optimizer = optax.sgd(0.03, momentum=0.9)


def init(key):
    first, second = jax.random.split(key)
    params = {
        "conv": jax.random.normal(first, (3, 3, 1, 16)) / 3,
        "scale": jnp.ones(16),
        "offset": jnp.zeros(16),
        "dense": jax.random.normal(second, (16 * 16, 10)) / 16,
        "bias": jnp.zeros(10),
    }
    return params, jnp.zeros(16), jnp.ones(16)


def forward(params, mean, var, x):
    x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * params["scale"] + params["offset"]
    x = jax.nn.relu(x)
    return x.reshape(-1, 4, 2, 4, 2, 16).max((2, 4)).reshape(-1, 16 * 16)


def train_step(state, batch, key):
    params, averages, opt_state = state

    def loss_fn(params):
        x = jax.lax.conv_general_dilated(
            batch["image"],
            params["conv"],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        statistics = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = forward(params, *statistics, x)
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
        logits = x @ params["dense"] + params["bias"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), (statistics, logits)

    (loss, (new, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    averages = jax.tree.map(lambda old, x: 0.9 * old + 0.1 * x, averages, new)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return (params, averages, opt_state), {"loss": loss, "accuracy": accuracy}


def batches(steps):
    digits = load_digits()
    for i in range(steps):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        image = digits.images[rows, ..., None].astype("float32") / 16
        yield {"image": image, "label": digits.target[rows].astype("int32")}


def train(mesh, steps):
    params, *averages = init(jax.random.key(0))
    state = params, tuple(averages), optimizer.init(params)
    step = ls.parallelize(train_step, mesh)
    losses = []
    for i, batch in enumerate(ls.prefetch(batches(steps), step)):
        state, metrics = step(state, batch, ls.step_key(jax.random.key(1), i))
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], state[0]


if __name__ == "__main__":
    losses, _ = train(ls.make_mesh(), steps=25)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {jax.device_count()} devices")
