"""A guide to pmap with Flax: replicate, shard, train.

After `# published:` stands the line that the guide has in place of the next one.
"""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x.reshape((x.shape[0], -1))))
        return nn.Dense(10)(x)


model = Net()
key = jax.random.PRNGKey(0)
params = model.init(key, jnp.ones([1, 4, 4, 1]))["params"]
tx = optax.adam(learning_rate=1e-2)


class TrainState(train_state.TrainState):
    pass


state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

num_devices = jax.local_device_count()
# published: replicated_state = jax.device_put_replicate(state, jax.local_devices())
replicated_state = jax.device_put_replicated(state, jax.local_devices())
shapes = jax.tree_util.tree_map(lambda x: x.shape, replicated_state.params)
print("Replicated kernel:", shapes["Dense_0"]["kernel"])

global_batch_size = 16
local_batch_size = global_batch_size // num_devices


def shard_batch(batch):
    return jax.tree_util.tree_map(
        lambda x: x.reshape((num_devices, local_batch_size) + x.shape[1:]), batch
    )


def compute_loss(params, batch, apply_fn):
    logits = apply_fn({"params": params}, batch["image"])
    one_hot_labels = jax.nn.one_hot(batch["label"], num_classes=10)
    loss = -jnp.sum(one_hot_labels * jax.nn.log_softmax(logits), axis=-1)
    return jnp.mean(loss)


def train_step(state, batch):
    grad_fn = jax.value_and_grad(compute_loss)
    loss, grads = grad_fn(state.params, batch, state.apply_fn)
    averaged_grads = jax.lax.pmean(grads, axis_name="batch_axis")
    new_state = state.apply_gradients(grads=averaged_grads)
    return new_state, loss


p_train_step = jax.pmap(train_step, axis_name="batch_axis")

data = np.random.default_rng(0)
means = data.normal(size=(10, 4, 4, 1))
losses = []
for _ in range(20):
    labels = data.integers(0, 10, global_batch_size)
    batch = {"image": np.float32(means[labels]), "label": labels}
    replicated_state, local_losses = p_train_step(replicated_state, shard_batch(batch))
    losses.append(jnp.mean(local_losses))
losses = [float(loss) for loss in losses]
print("Losses:", losses)

main_key = jax.random.PRNGKey(42)
step_key, main_key = jax.random.split(main_key)
dropout_keys = jax.random.split(step_key, num_devices)
