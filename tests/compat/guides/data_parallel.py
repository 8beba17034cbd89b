"""A notebook guide to pmap on one machine; each `# %%` starts a cell.

After `# published:` stands the line that the guide has in place of the next one.
"""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

# %%
# published: %pip install -q -U "jax[cuda12_pip]" optax flax
# (everything is installed)

# %%
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax import tree_util

print("Total devices:", jax.device_count())
print("Local devices:", jax.local_device_count())

per_device_batch_size = 4
global_batch_size = per_device_batch_size * jax.local_device_count()


# %%
def prepare_batch(batch):
    images, labels = batch
    images = images.reshape((jax.local_device_count(), -1, *images.shape[1:]))
    labels = labels.reshape((jax.local_device_count(), -1))
    return images, labels


def shard(tree):
    return tree_util.tree_map(
        lambda x: x.reshape((jax.local_device_count(), -1, *x.shape[1:])),
        tree,
    )


# %%
def to_device(tree):
    # published: shards = tree_util.tree_map(lambda x: [row for row in x], tree)
    shards = tree
    return tree_util.tree_map(
        # published: lambda xs: jax.device_put_sharded(xs, jax.local_devices()),
        lambda xs: jax.device_put_sharded(list(xs), jax.local_devices()),
        shards,
    )


# %%
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x.reshape((x.shape[0], -1))))
        x = nn.Dropout(0.25, deterministic=False)(x)
        return nn.Dense(10)(x)


def create_train_state(rng, model, learning_rate):
    params_rng, dropout_rng = jax.random.split(rng)
    rngs = {"params": params_rng, "dropout": dropout_rng}
    params = model.init(rngs, jnp.ones([1, 4, 4, 1]))["params"]
    tx = optax.adamw(learning_rate)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return jax.device_put_replicated(state, jax.local_devices())


# %%
@partial(jax.pmap, axis_name="batch")
def train_step(state, batch, rng):
    images, labels = batch

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images, rngs={"dropout": rng})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    # published: jax.debug.print("loss shard {}", loss, ordered=True)
    new_state = state.apply_gradients(grads=grads)
    hits = (jnp.argmax(logits, axis=-1) == labels).mean()
    metrics = {
        "loss": jax.lax.pmean(loss, axis_name="batch"),
        "accuracy": jax.lax.pmean(hits, axis_name="batch"),
    }
    return new_state, metrics


# %%
def train_epoch(state, train_loader, rng):
    metrics_accumulator = []
    rngs = jax.random.split(rng, jax.local_device_count())

    for batch in train_loader:
        shard = prepare_batch(batch)
        state, metrics = train_step(state, shard, rngs)
        # published: metrics_accumulator.append(jax.device_get(metrics))
        metrics_accumulator.append(metrics)
        # published: rngs = jax.random.split(rngs, 2)[:, 0]
        rngs = jax.vmap(lambda key: jax.random.split(key)[0])(rngs)

    stacked = {
        k: jnp.stack([m[k] for m in metrics_accumulator])
        for k in metrics_accumulator[0]
    }
    return state, {k: float(v.mean()) for k, v in stacked.items()}


# %%
data = np.random.default_rng(0)
means = data.normal(size=(10, 4, 4, 1))


def loader(batches):
    for _ in range(batches):
        labels = data.integers(0, 10, global_batch_size)
        noise = 0.1 * data.normal(size=(global_batch_size, 4, 4, 1))
        yield np.float32(means[labels] + noise), labels


state = create_train_state(jax.random.PRNGKey(0), Net(), 1e-2)
placed = to_device(shard(next(loader(1))))
losses = []
for epoch in range(4):
    state, metrics = train_epoch(state, loader(8), jax.random.PRNGKey(epoch))
    losses.append(metrics["loss"])
print("Losses:", losses)
