"""Host to devices and back: replicate a state, shard a batch, read a tree.

Rows go from the host straight to their device; nothing passes through device 0.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lockstep import sharding, tree
from lockstep.devices import make_mesh
from lockstep.notices import say_once

REMAINDERS = ("error", "pad", "drop", "unsplit")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MaskedBatch:
    """A batch that may hold padding, with the mask that says where.

    `remainder="pad"` always yields one, for full batches too, so that every batch
    of a run has the same shape.

    Attributes:
        data: the user's batch, leaves `[B, ...]`.
        mask: float32 `[B]`, 1 for a real row and 0 for padding.
    """

    data: Any
    mask: Any


def replicate(state: Any, mesh: Mesh | None = None) -> Any:
    """Copy a tree to every device of the mesh.

    The caller's own arrays are never shared, so a step may donate the result.
    Python numbers become weakly typed arrays, so that no dtype drifts; `bool`,
    `str`, functions and `None` stay as they are.

    Raises:
        OverflowError: an integer does not fit 32 bits (and x64 is off).
        RuntimeError: a leaf was deleted (its buffer was donated to a step).

    Example:
        >>> state = replicate({"w": np.ones(3), "step": 0}, make_mesh())
        >>> state["w"].sharding.is_fully_replicated, state["step"].weak_type
        (True, True)
    """
    where = sharding.replicated(make_mesh() if mesh is None else mesh)
    return map_named(lambda path, leaf: copy_to(leaf, where, path), state, "state")


def shard_batch(
    batch: Any,
    mesh: Mesh | None = None,
    *,
    axis_name: str | None = None,
    remainder: str = "error",
    multiple: int = 1,
    at_least: int = 0,
) -> Any:
    """Split the rows of a batch over the devices of one mesh axis.

    Args:
        batch: a tree of `[B, ...]` arrays (NumPy, torch, TensorFlow, JAX). Leaves of
            rank 0 have no rows and are replicated; `None` and `bool` pass through.
        mesh: the devices; all of them when `None`.
        axis_name: the mesh axis that splits the rows: "data" if there are several.
        remainder: what to do with rows that do not divide: `"error"`; `"pad"` (the
            result is a `MaskedBatch`); `"drop"` (the result is `None` when no row
            is left); `"unsplit"` (every device holds the whole short batch).
        multiple: each device's rows must divide by this (microbatches, shards).
        at_least: rows that a padded batch has at least, so that the short last batch
            of an epoch gets the shape of the full ones.

    Raises:
        ValueError: no rows, unequal rows, text leaves, or rows that do not divide.

    Example:
        >>> mesh = make_mesh()
        >>> tuple(shard_batch({"x": np.ones((16, 3))}, mesh)["x"].sharding.spec)
        ('data',)
        >>> shard_batch({"x": np.ones((5, 3))}, mesh, remainder="pad").mask.sum()
        Array(5., dtype=float32)
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder={remainder!r} is not one of {REMAINDERS}")
    mesh = make_mesh() if mesh is None else mesh
    axis_name = sharding.row_axis(mesh, axis_name)
    by_rows = sharding.rows(mesh, axis_name)
    need = mesh.shape[axis_name] * multiple
    if isinstance(batch, MaskedBatch):
        batch, mask = batch.data, batch.mask
        batch = MaskedBatch(check_batch(batch), mask)
        if count_rows(batch.data) % need:
            raise ValueError(_does_not_divide(batch.data, mesh, axis_name, multiple))
        return _put_rows(batch, by_rows)
    batch = check_batch(batch)
    left_over = count_rows(batch) % need
    if remainder == "pad":
        return _put_rows(pad_batch(batch, need, at_least=at_least), by_rows)
    if left_over and remainder == "error":
        raise ValueError(_does_not_divide(batch, mesh, axis_name, multiple))
    if left_over and remainder == "drop":
        say_once(
            "dropped rows",
            f"remainder='drop': the last {left_over} of {count_rows(batch)} rows of a "
            f"batch are left out, for {need} rows make a whole part on every device "
            "(further drops are not reported; step.dropped_rows counts them)",
        )
        return _put_rows(_drop_rows(batch, left_over), by_rows)
    if left_over:
        return _put_rows(batch, sharding.replicated(mesh))
    return _put_rows(batch, by_rows)


def pad_batch(batch: Any, multiple: int, *, at_least: int = 0) -> MaskedBatch:
    """Repeat the last row until the rows divide, and say which rows are real.

    Padding repeats a real row and never holds zeros: zeros make NaN gradients where
    a norm or a logarithm meets them.

    Args:
        batch: a tree of `[B, ...]` arrays.
        multiple: the row count of the result is the next multiple of this.
        at_least: ... and no smaller than this.

    Returns:
        `MaskedBatch(data, mask)` of host arrays.

    Example:
        >>> padded = pad_batch(np.array([7, 8, 9]), 4)
        >>> padded.data, padded.mask
        (array([7, 8, 9, 9]), array([1., 1., 1., 0.], dtype=float32))
    """
    batch = check_batch(batch)
    n = count_rows(batch)
    extra = max(n, at_least) - n
    extra += -(n + extra) % multiple
    mask = np.concatenate([np.ones(n, np.float32), np.zeros(extra, np.float32)])
    if not extra:
        return MaskedBatch(batch, mask)
    index = np.minimum(np.arange(n + extra), n - 1)
    return MaskedBatch(take_rows(batch, index), mask)


def to_host(values: Any) -> Any:
    """The tree with every array as NumPy, whole on every process.

    A replicated array is read from one shard; an array split over processes is
    gathered. Typed keys stay keys, on one device, for NumPy cannot hold them.

    Example:
        >>> to_host(replicate({"w": 2.5}, make_mesh()))
        {'w': array(2.5, dtype=float32)}
    """
    for path, leaf in tree.named_leaves(values):
        tree.check_leaf_alive(leaf, path)
    return jax.tree.map(_to_host, values)


def count_rows(batch: Any, name: str = "batch") -> int:
    """The common number of rows of all leaves with rows.

    Raises:
        ValueError: there is no leaf with rows, or two leaves disagree.
    """
    found = [
        (path, leaf.shape[0])
        for path, leaf in tree.named_leaves(batch, name)
        if tree.is_array(leaf) and len(leaf.shape) > 0
    ]
    if not found:
        raise ValueError(
            f"{name} has no array with rows: a batch is a tree of [B, ...] arrays"
        )
    path, n = found[0]
    for other, m in found:
        if m != n:
            raise ValueError(
                f"{other} has {m} rows and {path} has {n}: all leaves of one batch "
                "need the same number of rows; give arrays without rows (class "
                "weights) as a further argument of the step"
            )
    if n == 0:
        raise ValueError(f"{path} has 0 rows: the batch is empty")
    return n


def check_batch(batch: Any, name: str = "batch") -> Any:
    """The batch with host leaves as arrays, or an error that names the bad leaf.

    Raises:
        ValueError: a text or object leaf, or no rows.
    """

    def check(path: str, leaf: Any) -> Any:
        leaf = tree.as_host(leaf)
        kind = getattr(getattr(leaf, "dtype", None), "kind", "")
        fields = getattr(getattr(leaf, "dtype", None), "names", None)
        if isinstance(leaf, (str, bytes)) or kind in tuple("USOMm") or fields:
            raise ValueError(
                f"{path} is text or objects ({tree.describe_leaf(leaf)}), and devices "
                "hold numbers only: encode it as integers, or leave it out of the batch"
            )
        check_registered(leaf, path)
        return leaf

    batch = map_named(check, batch, name)
    count_rows(batch, name)
    return batch


def check_registered(leaf: Any, path: str) -> None:
    """Refuse a dataclass that JAX takes for one static leaf.

    Raises:
        ValueError: names the leaf and how to register its class.
    """
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        raise ValueError(
            f"{path} is a {type(leaf).__name__}, a dataclass in which JAX sees no "
            "arrays: decorate the class with @jax.tree_util.register_dataclass"
        )


def map_named(fn: Any, values: Any, name: str) -> Any:
    """`jax.tree.map` whose function gets the leaf's path as its first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fn(name + jax.tree_util.keystr(path), leaf), values
    )


def take_rows(batch: Any, index: Any) -> Any:
    """The rows at `index` of every leaf that has rows."""
    return jax.tree.map(
        lambda x: x[index] if tree.is_array(x) and len(x.shape) else x, batch
    )


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
    return jax.device_put(_ready(leaf, where, path, lend=lend), where)


def _ready(leaf: Any, where: NamedSharding, path: str, *, lend: bool = True) -> Any:
    """A leaf that can be put as it is: its values fit, its memory is its own."""
    check_fits(leaf, path)
    on_cpu = next(iter(where.device_set)).platform == "cpu"
    if on_cpu and isinstance(leaf, np.ndarray):
        return own_memory(leaf, lend=lend)
    return leaf


_X64 = "make it smaller, or set jax.config.update('jax_enable_x64', True)"


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


def _put_rows(batch: Any, where: NamedSharding) -> Any:
    """Place leaves with rows at `where`, and the others on every device.

    All leaves go in one `device_put`, which costs less than one a leaf.
    """
    if batch is None:
        return None
    everywhere = sharding.replicated(where.mesh)
    named = tree.named_leaves(batch, "batch")
    moving = [i for i, (_, leaf) in enumerate(named) if not tree.is_static(leaf)]
    places = [where if np.ndim(named[i][1]) else everywhere for i in moving]
    ready = [_ready(named[i][1], where, named[i][0]) for i in moving]
    leaves = [leaf for _, leaf in named]
    for i, placed in zip(moving, jax.device_put(ready, places), strict=True):
        leaves[i] = placed
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _drop_rows(batch: Any, left_over: int) -> Any:
    kept = count_rows(batch) - left_over
    return take_rows(batch, slice(kept)) if kept else None


def _does_not_divide(batch: Any, mesh: Mesh, axis_name: str, multiple: int) -> str:
    path = next(
        path
        for path, leaf in tree.named_leaves(batch, "batch")
        if tree.is_array(leaf) and len(leaf.shape)
    )
    n, devices = count_rows(batch), mesh.shape[axis_name]
    need = devices * multiple
    below, above = n - n % need, n - n % need + need
    sizes = f"{below} or {above}" if below else f"{above}"
    micro = f" times {multiple} microbatches or shards" if multiple > 1 else ""
    return (
        f"{path} has {n} rows; the {devices} devices on {axis_name!r}{micro} need a "
        f"multiple of {need}: use remainder='pad', or {sizes} rows"
    )


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if tree.is_key(leaf):
        words = _to_host(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
