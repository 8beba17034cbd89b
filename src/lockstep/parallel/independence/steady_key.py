"""A random key whose draws are the same in every place of an array.

A row's numbers depend on its place in the batch, and the same row has another place on
another device. With such a key that plays no part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def steady_key() -> jax.Array:
    """One key, to split and fold as any other.

    Its uniform numbers lie between 1/16 and 5/16, so that a dropout keeps all values.

    Example:
        >>> draws = jax.random.uniform(steady_key(), (3,))
        >>> bool((draws == draws[0]).all())
        True
    """
    return jax.random.key(0, impl=_STEADY)


def _words(key: Any) -> Any:
    return key.astype(jnp.uint32)


def _seed(seed: Any) -> Any:
    return jnp.asarray(seed).astype(jnp.uint32).reshape(1)


def _mix(word: Any, number: Any) -> Any:
    """Another word for each pair (the multiplier is that of Knuth's hash)."""
    return (word ^ jnp.asarray(number).astype(jnp.uint32)) * jnp.uint32(2654435761) + 1


def _split(key: Any, shape: tuple[int, ...]) -> Any:
    numbers = jnp.arange(1, 1 + _size(shape), dtype=jnp.uint32)
    return _mix(key[0], numbers).reshape(*shape, 1)


def _fold_in(key: Any, number: Any) -> Any:
    return _mix(_mix(key, number), 1)


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    word = (key[0] * jnp.uint32(2246822519)) >> 2  # below a quarter of the range
    word = (word + jnp.uint32(1 << 28)).astype(jnp.uint32)
    kinds = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
    if width == 64:
        bits = word.astype(jnp.uint64) << 32
    else:
        bits = (word >> (32 - width)).astype(kinds[width])
    return jnp.broadcast_to(bits, shape)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


_STEADY = define_prng_impl(
    key_shape=(1,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="steady",
    tag="steady",
)
