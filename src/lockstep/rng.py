"""Random keys: one a step, one a device, one a name, and host generators.

All of it is `jax.random.fold_in`, so a key is found again from the base key and a few
numbers: nothing has to be stored, and a run resumed on another device count draws what
the first run would have drawn. A key is never split per device.

The keys form a tree and every kind of child has branches of its own:

    base -- step 0, 1, ... 2**31 - 1           step_key(base, step)
      |       -- device 0, 1, ...              device_key(key)
      |            -- microbatch 0, 1, ...     (accumulate > 1)
      -- 2**31 -- 64 bits of a name            stream(base, name)

Two keys are equal only if their paths are, or if 64 bits of threefry agree by chance.
"""

import hashlib
import operator
from typing import Any

import jax
import numpy as np
from jax import lax

from lockstep import tree

# Steps, devices and microbatches are int32 and so never reach this branch.
_STREAMS = 2**31


def step_key(key: jax.Array, step: int | np.integer | jax.Array) -> jax.Array:
    """The key of one step: equal on every device, different on every step.

    Args:
        key: the base key of the run, typed (`jax.random.key`) or raw
            (`jax.random.PRNGKey`).
        step: the step's number, from 0; a Python int or a traced integer.

    Returns:
        A key of the same kind as `key`.

    Raises:
        TypeError: `key` is not one key, or `step` is not one integer.
        ValueError: `step` is negative or above 2**31 - 1.

    Example:
        >>> base = jax.random.key(0)
        >>> bool(jax.random.bits(step_key(base, 1)) == jax.random.bits(base))
        False
    """
    check_key(key)
    if isinstance(step, jax.Array):
        if step.shape or not jax.numpy.issubdtype(step.dtype, np.integer):
            raise TypeError(f"step is {step.dtype}{list(step.shape)}, not one integer")
        return jax.random.fold_in(key, step)
    number = operator.index(step)
    if not 0 <= number < _STREAMS:
        raise ValueError(f"step is {number}; a step is from 0 to {_STREAMS - 1}")
    return jax.random.fold_in(key, number)


def device_key(key: jax.Array, axis_name: str = "data") -> jax.Array:
    """The key of this device, inside `per_device` or `jax.shard_map`.

    Args:
        key: one key, equal on all devices.
        axis_name: the mesh axis whose index is folded in.

    Returns:
        A key that differs between the devices of `axis_name`.

    Raises:
        TypeError: `key` is not one key.
        NameError: there is no such axis here.

    Example:
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        >>> def draw(key):
        ...     return jax.random.bits(device_key(key))[None]
        >>> draws = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("data"))
        >>> a, b = jax.jit(draws)(jax.random.key(0))
        >>> bool(a == b)
        False
    """
    check_key(key)
    return jax.random.fold_in(key, lax.axis_index(axis_name))


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named stream: `stream(key, "dropout")`, `stream(key, "noise")`.

    Streams never meet each other, nor the step keys of the same base: a name's place
    is 64 bits of its SHA-256, on a branch that no step reaches. A stream of a step's
    key is a new stream on every step.

    Args:
        key: a base key, a step's key or any other single key.
        name: any text that is not empty.

    Returns:
        A key of the same kind as `key`.

    Raises:
        TypeError: `key` is not one key, or `name` is not text.
        ValueError: `name` is empty.

    Example:
        >>> key = jax.random.key(0)
        >>> float(jax.random.uniform(stream(key, "dropout"))) == float(
        ...     jax.random.uniform(stream(key, "noise")))
        False
    """
    check_key(key)
    if not isinstance(name, str):
        raise TypeError(f"a stream has a text as its name, not {name!r}")
    if not name:
        raise ValueError("a stream's name is empty: name what it draws, as 'dropout'")
    digest = hashlib.sha256(name.encode()).digest()
    key = jax.random.fold_in(key, np.uint32(_STREAMS))
    for word in np.frombuffer(digest[:8], "<u4"):
        key = jax.random.fold_in(key, np.uint32(word))
    return key


def host_rng(
    seed: int, *, process: int | None = None, worker: int = 0, epoch: int = 0
) -> np.random.Generator:
    """A NumPy generator for host work such as augmentation.

    Each (seed, process, worker, epoch) has draws of its own, and the same draws in
    every run.

    Args:
        seed: the seed of the run, 0 or more.
        process: this process's number; `None` asks `jax.process_index()`, which starts
            the backend: give the number inside a data loader's worker process.
        worker: the number of the data loader's worker.
        epoch: the number of the epoch.

    Raises:
        ValueError: a negative number.

    Example:
        >>> a, b = host_rng(0, process=0), host_rng(0, process=1)
        >>> bool(a.random() == b.random())
        False
    """
    if process is None:
        process = jax.process_index()
    numbers = dict(seed=seed, process=process, worker=worker, epoch=epoch)
    for name, number in numbers.items():
        if operator.index(number) < 0:
            raise ValueError(f"{name} is {number}; it must be 0 or more")
    sequence = np.random.SeedSequence(seed, spawn_key=(process, worker, epoch))
    return np.random.default_rng(sequence)


def check_key(key: Any, name: str = "key") -> None:
    """Raise a TypeError unless `key` is one key, typed or raw."""
    if tree.is_key(key):
        if key.shape == ():
            return
        raise TypeError(
            f"{name} is an array of keys of shape {key.shape}, not one key: steps, "
            "devices and names are folded into one key"
        )
    raw = getattr(key, "dtype", None) == np.uint32 and key.shape in ((2,), (4,))
    if not raw:
        raise TypeError(
            f"{name} is {tree.describe_leaf(key)}, not a random key: make one with "
            "jax.random.key(seed)"
        )
