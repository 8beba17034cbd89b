"""One random key a device, and how to go on from there."""

import jax
import jax.numpy as jnp


def shard_prng_key(prng_key: jax.Array) -> jax.Array:
    """One key for each local device, `[N]` (or `[N, 2]` of raw keys).

    Example:
        >>> shard_prng_key(jax.random.key(0)).shape
        (8,)
    """
    return jax.random.split(prng_key, jax.local_device_count())


def refresh_keys(keys: jax.Array) -> jax.Array:
    """New keys in the place of old ones, each made on its own device.

    `jax.random.split(keys, 2)[:, 0]`, as guides write it, is an error: a stack of keys
    is not one key.

    Args:
        keys: one key a device, typed `[N]` or raw `uint32[N, 2]`.

    Raises:
        TypeError: `keys` is one key; `shard_prng_key` makes one a device of it.

    Example:
        >>> keys = shard_prng_key(jax.random.key(0))
        >>> refresh_keys(keys).shape
        (8,)
    """
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if keys.ndim != (1 if typed else 2):
        raise TypeError(
            f"keys is {keys.dtype}{list(keys.shape)}, not one key a device: start from "
            "lockstep.compat.shard_prng_key(key)"
        )
    return _refresh(keys)


@jax.jit
def _refresh(keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.split(key)[0])(keys)
