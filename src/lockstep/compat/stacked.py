"""Stacked trees: a leading device axis, row `i` on device `i`, as `pmap` takes them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_map_with_path

from lockstep.compat.mapping.shards import stacked
from lockstep.placement import own_memory


def device_put_replicated(x: Any, devices: Sequence[jax.Device]) -> Any:
    """One copy of every leaf on each device, stacked: `[...]` becomes `[N, ...]`.

    Python numbers stay weakly typed, so that they promote nothing; the caller's
    arrays are copied, never shared.

    Args:
        x: a tree of arrays, numbers and keys.
        devices: a sequence of N devices; row i lies on `devices[i]`.

    Raises:
        ValueError: `devices` is not a sequence, is empty, or names a device twice.
        TypeError: a leaf is no number, array or key.

    Example:
        >>> w = device_put_replicated({"w": np.ones(3)}, jax.local_devices())["w"]
        >>> w.shape, w.addressable_shards[2].data.shape
        ((8, 3), (1, 3))
    """
    if not isinstance(devices, Sequence) or not devices:
        raise ValueError(
            "`devices` argument to `device_put_replicated` must be a non-empty "
            f"sequence, not {devices!r}"
        )
    return jax.tree.map(lambda leaf: _stack([leaf] * len(devices), devices), x)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """The N trees `shards` as one stacked tree, `shards[i]` on `devices[i]`.

    Args:
        shards: a list or tuple of N trees alike in structure, and in the shape, dtype
            and weakness of every leaf.
        devices: N devices.

    Raises:
        TypeError: `shards` is an array; give the list of its rows.
        ValueError: the numbers of shards and devices, or two shards, differ.

    Example:
        >>> rows = [np.full(2, i) for i in range(8)]
        >>> device_put_sharded(rows, jax.local_devices())[:, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if not isinstance(shards, Sequence):
        raise TypeError(
            "device_put_sharded `shards` input must be a sequence (a list or tuple, "
            f"one tree a device); got {type(shards).__name__}"
        )
    if len(shards) != len(devices):
        raise ValueError(
            f"len(shards) = {len(shards)} must equal len(devices) = {len(devices)}: "
            "give one shard a device"
        )
    if not len(shards):
        raise ValueError("device_put_sharded needs at least one shard and device")

    def stack(path: Any, *rows: Any) -> jax.Array:
        kinds = [_kind(row) for row in rows]
        for i, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    "the shards passed to device_put_sharded must be alike: "
                    f"shards[0]{keystr(path)} is {kinds[0]} and "
                    f"shards[{i}]{keystr(path)} is {kind}"
                )
        return _stack(rows, devices)

    return tree_map_with_path(stack, *shards)


def replicate(
    tree: Any, devices: Sequence[jax.Device] | None = None, axis_name: str = "batch"
) -> Any:
    """`device_put_replicated` onto this process's devices, in `pmap`'s order.

    Args:
        tree: a tree of arrays, numbers and keys.
        devices: onto these instead.
        axis_name: what the mesh calls the device axis.

    Example:
        >>> replicate({"lr": 0.1})["lr"].shape
        (8,)
    """
    devices = tuple(devices or jax.local_devices())
    return jax.tree.map(lambda x: _stack([x] * len(devices), devices, axis_name), tree)


def unreplicate(tree: Any) -> Any:
    """Row 0 of every leaf, on the one device that holds it: no gather, no collective.

    An array that is the same on all devices has no row of its own to take, and comes
    back as it lies on one device. Where its leading axis could be the device axis
    all the same, nobody can tell what was meant, and it is refused.

    Raises:
        ValueError: a leaf is replicated over N devices and has N rows.

    Example:
        >>> unreplicate(replicate(np.arange(3))).tolist()
        [0, 1, 2]
    """
    return tree_map_with_path(_first_row, tree)


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int,
    devices: Sequence[jax.Device] | None = None,
    axis_name: str = "batch",
) -> Iterator[Any]:
    """Stacked batches from the host, put on the devices `size` batches ahead.

    Args:
        iterator: yields trees of arrays `[N, ...]`, one row a device.
        size: how many batches wait on the devices; 2 overlaps copying with computing.
        devices: N devices; default those of this process, in `pmap`'s order.
        axis_name: what the mesh calls the device axis.

    Raises:
        ValueError: a leaf has another number of rows than there are devices.

    Example:
        >>> [b["x"].shape for b in prefetch_to_device([{"x": np.ones((8, 4))}], 2)]
        [(8, 4)]
    """
    devices = tuple(devices or jax.local_devices())
    sharding = stacked(devices, name=axis_name)

    def put(path: Any, leaf: Any) -> jax.Array:
        if leaf.shape[:1] != (len(devices),):
            raise ValueError(
                f"batch{keystr(path)} has shape {leaf.shape}; its leading axis must be "
                f"the {len(devices)} devices: split it with lockstep.compat.shard()"
            )
        return jax.device_put(own_memory(leaf), sharding)

    waiting: deque[Any] = deque()
    for batch in iterator:
        waiting.append(tree_map_with_path(put, batch))
        if len(waiting) >= size:
            yield waiting.popleft()
    yield from waiting


def shard(xs: Any) -> Any:
    """Splits the rows of every leaf over the N local devices.

    Args:
        xs: a tree of arrays `[B, ...]`.

    Returns:
        The tree with leaves `[N, B / N, ...]`.

    Raises:
        ValueError: the rows do not divide by the number of devices.

    Example:
        >>> shard({"x": np.ones((32, 3))})["x"].shape
        (8, 4, 3)
    """
    count = jax.local_device_count()

    def split(path: Any, x: Any) -> Any:
        shape = getattr(x, "shape", ())  # a Python number has none
        if not shape or shape[0] % count:
            raise ValueError(
                f"xs{keystr(path)} has shape {shape}; {count} devices need a "
                f"multiple of {count} rows: drop or pad rows, or use pad_shard_unpad"
            )
        return x.reshape((count, shape[0] // count, *shape[1:]))

    return tree_map_with_path(split, xs)


def stack_forest(forest: Sequence[Any]) -> Any:
    """A sequence of trees as one tree of NumPy arrays with a new leading axis.

    Example:
        >>> stack_forest([{"loss": 1.0}, {"loss": 0.5}])
        {'loss': array([1. , 0.5])}
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *forest)


def get_metrics(device_metrics: Sequence[Any]) -> Any:
    """The metrics of many steps, as `pmap` returned them, over time and on the host.

    Args:
        device_metrics: one tree a step, of leaves `[N, ...]` equal in all rows.

    Returns:
        One tree of NumPy arrays `[steps, ...]`.

    Example:
        >>> steps = [replicate({"loss": loss}) for loss in (1.0, 0.5)]
        >>> get_metrics(steps)["loss"].tolist()
        [1.0, 0.5]
    """
    return stack_forest(jax.device_get(unreplicate(device_metrics)))


def onehot(
    labels: Any, num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> jax.Array:
    """`labels [...]` as float32 `[..., num_classes]`; new code has `jax.nn.one_hot`.

    Example:
        >>> onehot(np.array([1, 0]), 2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    hot = jnp.asarray(labels)[..., None] == jnp.arange(num_classes)
    return jnp.where(hot, on_value, off_value).astype(jnp.float32)


def _stack(
    rows: Sequence[Any], devices: Sequence[jax.Device], axis_name: str = "batch"
) -> jax.Array:
    """Row i on device i; all rows are alike."""
    kind, sharding = _kind(rows[0]), stacked(tuple(devices), name=axis_name)
    if kind.weak_type:  # assembled from pieces it would come out strong
        first = [jax.device_put(row, devices[0]) for row in rows]
        return jax.device_put(jnp.stack(first), sharding)
    if not any(isinstance(row, jax.Array) for row in rows):
        return jax.device_put(_stack_on_host(rows, kind.dtype), sharding)
    # Each row straight to its own device; one for all of them is lifted once.
    lifted = {id(row): jnp.expand_dims(row, 0) for row in rows}
    pieces = jax.device_put([lifted[id(row)] for row in rows], list(devices))
    shape = (len(rows), *kind.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _stack_on_host(rows: Sequence[Any], dtype: Any) -> np.ndarray:
    """The rows as one array; where all are one object, as views of one copy."""
    if all(row is rows[0] for row in rows):
        row = own_memory(np.asarray(rows[0], dtype))
        return np.broadcast_to(row, (len(rows), *row.shape))
    return np.stack([np.asarray(row, dtype) for row in rows])


def _kind(leaf: Any) -> Any:
    """Shape, dtype and weakness."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{leaf} describes an array and has no values to put on a device"
        )
    return jax.typeof(leaf)


def _first_row(path: Any, leaf: Any) -> Any:
    if not np.ndim(leaf):
        return leaf
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf[0]
    devices = len(leaf.sharding.device_set)
    first = leaf.addressable_shards[0].data
    if devices == 1 or first.shape[1:] != leaf.shape[1:]:
        return leaf[0]  # no copies: a row of its own, or one that is split further
    if first.shape[0] < leaf.shape[0]:
        return first.squeeze(0) if first.shape[0] == 1 else first[0]
    if leaf.shape[0] == devices:
        raise ValueError(
            f"tree{keystr(path)} {list(leaf.shape)} is the same on all {devices} "
            "devices: nobody can tell whether its leading axis is the device axis; "
            "take x[0] for its first row, or x itself"
        )
    return first
