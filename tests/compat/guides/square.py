"""An introduction to pmap with one small function.

After `# published:` stands the line that the guide has in place of the next one.
"""

import jax
import jax.numpy as jnp


def square(x):
    return x**2


parallel_square = jax.pmap(square)

n_devices = jax.device_count()
x = jnp.arange(n_devices * 4).reshape(n_devices, 4)
print(f"Input shape: {x.shape}")

# published: # On JAX 0.9+ pmap preserves the device axis: the function sees (1, 4).
result = parallel_square(x)
print(f"Output shape: {result.shape}")
print(result)

total_batch = 16
per_device = total_batch // n_devices
data = jax.random.normal(jax.random.PRNGKey(0), (total_batch, 3))
sharded_data = data.reshape(n_devices, per_device, 3)

ranks = []
jax.pmap(lambda rows: ranks.append(rows.ndim) or rows)(sharded_data)
print("Rank inside:", ranks[0], "outside:", sharded_data.ndim)
