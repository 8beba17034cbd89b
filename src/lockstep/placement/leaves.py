"""One leaf on the devices: its values fit, and its memory is its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lockstep import tree
from lockstep.notices import say_once
from lockstep.placement import spreading
from lockstep.placement.host_batches import check_registered

_X64 = "make it smaller, or set jax.config.update('jax_enable_x64', True)"


def copy_to(leaf: Any, where: NamedSharding, path: str) -> Any:
    """One leaf on all devices of `where`, never sharing the caller's buffer."""
    leaf = tree.as_host(leaf)
    check_registered(leaf, path)
    if tree.is_static(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        tree.check_leaf_alive(leaf, path)
        # device_put would share the buffer on the device where the array lies, and
        # a donated copy would then delete the caller's array.
        leaf = jnp.copy(leaf)
    return put(leaf, where, path, lend=False)


def put(leaf: Any, where: NamedSharding, path: str, *, lend: bool = True) -> Any:
    """`jax.device_put` with a check that the value keeps its meaning.

    `lend=False` is for what will be donated: memory on loan cannot be reused.
    """
    leaf = ready(leaf, where, path, lend=lend)
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    return spreading.everywhere(leaf, where)


def put_whole(array: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    """A global array that every process holds whole, placed as it was before."""
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def ready(leaf: Any, where: NamedSharding, path: str, *, lend: bool = True) -> Any:
    """A leaf that can be put as it is: its values fit, its memory is its own."""
    check_fits(leaf, path)
    on_cpu = next(iter(where.device_set)).platform == "cpu"
    if on_cpu and isinstance(leaf, np.ndarray):
        return own_memory(leaf, lend=lend)
    return leaf


def own_memory(array: np.ndarray, *, lend: bool = True) -> np.ndarray:
    """A copy that nobody else writes to, for a CPU device borrows what it is given.

    It does so where the memory starts at a multiple of 64 bytes, whatever `may_alias`
    says, and a loader that fills its buffer anew would change the batch under way. The
    copy starts at such a multiple, which spares the device a copy of its own, or, with
    `lend=False`, beside one.
    """
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + (0 if lend else 16)
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def check_fits(leaf: Any, path: str) -> None:
    """Refuse 64-bit integers that 32 bits cannot hold; say once that floats narrow."""
    if jax.config.jax_enable_x64 or isinstance(leaf, jax.Array):
        return
    dtype = "int64" if type(leaf) is int else getattr(leaf, "dtype", None)
    narrow = {"int64": np.int32, "uint64": np.uint32}.get(str(dtype))
    if narrow is not None and np.size(leaf):
        limits = np.iinfo(narrow)
        for value in (np.min(leaf), np.max(leaf)):
            if not limits.min <= value <= limits.max:
                raise OverflowError(
                    f"{path} holds {value}, which does not fit {limits.dtype} "
                    f"(JAX keeps 32 bits by default): {_X64}"
                )
    if str(dtype) in ("float64", "complex128"):
        say_once(
            "float64",
            f"{path} is {dtype} and becomes {jax.dtypes.canonicalize_dtype(dtype)} on "
            "the devices, as in plain JAX (further such leaves are not reported)",
        )
