"""Batches whose shards weigh differently, and the same batches evened out.

A mean of means is right as long as all shards have the same number of valid rows. So
it is found by an experiment: the step runs again on a batch in which they have.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lockstep import placement, tree
from lockstep.debug.comparing.trials import Call, map_batches, parts_on_each
from lockstep.parallel.parallel_step import ParallelStep

_MASK_NAME = re.compile(r"mask|weight|valid|len|pad", re.IGNORECASE)
# What stands for "no token" and "no label".
_FILLINGS = (0, -1, -100)


@dataclasses.dataclass(frozen=True)
class Uneven:
    """One source of weights that differ between the shards.

    Attributes:
        weights: the sum of the weights on each shard.
        unit: what is counted: "rows" or "entries".
        evened: the call with equal weights everywhere.
        is_mask: whether it surely is a mask, rather than looks like one.
    """

    weights: tuple[float, ...]
    unit: str
    evened: Call
    is_mask: bool


def uneven_weights(step: ParallelStep, call: Call, devices: int) -> Iterator[Uneven]:
    """All that may weigh the shards unequally, the most likely first."""
    yield from _padding(step, call, devices)
    leaves = [
        (i, number, path, np.asarray(leaf))
        for i in step.batch_argnums
        for number, (path, leaf) in enumerate(tree.named_leaves(call.args[i], ""))
        if tree.is_array(leaf) and len(leaf.shape) and not tree.is_key(leaf)
    ]
    leaves.sort(key=lambda leaf: _MASK_NAME.search(leaf[2]) is None)
    for i, number, path, values in leaves:
        for weights, even in _readings(path, values):
            sums = tuple(x.sum() for x in shards(step, weights, devices))
            if len(set(sums)) > 1:
                yield Uneven(
                    sums,
                    "rows" if values.ndim == 1 else "entries",
                    call.with_argument(i, _replace_leaf(call.args[i], number, even)),
                    is_mask=_MASK_NAME.search(path) is not None,
                )


def equal_shards(step: ParallelStep, call: Call, devices: int) -> Call:
    """The call with the rows of the first device on every device."""

    def repeat(batch: Any) -> Any:
        rows = np.arange(placement.count_rows(batch))
        return placement.take_rows(batch, rows % len(shards(step, rows, devices)[0]))

    return map_batches(step, call, repeat)


def shards(step: ParallelStep, values: np.ndarray, devices: int) -> list[np.ndarray]:
    """Values `[B, ...]` as the devices get them; the last ones may be short."""
    parts = parts_on_each(step, devices)
    each = -(-len(values) // (devices * parts)) * parts
    return [values[i * each : (i + 1) * each] for i in range(devices)]


def _padding(step: ParallelStep, call: Call, devices: int) -> Iterator[Uneven]:
    """Rows that do not divide, under remainder="pad"."""
    if step.remainder != "pad" or not step.batch_argnums:
        return
    rows = np.arange(placement.count_rows(call.args[step.batch_argnums[0]]))
    sizes = tuple(len(x) for x in shards(step, rows, devices))
    if len(set(sizes)) > 1:
        whole = np.arange(max(sizes) * devices) % len(rows)
        full = map_batches(step, call, lambda b: placement.take_rows(b, whole))
        yield Uneven(sizes, "rows", full, is_mask=True)


def _readings(path: str, values: np.ndarray) -> Iterator[tuple[np.ndarray, Any]]:
    """The ways to read a leaf as weights, each with the leaf that weighs evenly."""
    kind = values.dtype.kind
    if kind not in "biuf" and str(values.dtype) != "bfloat16":
        return
    weights = values.astype(np.float64)
    if _MASK_NAME.search(path) or np.isin(weights, (0, 1)).all():
        yield weights, np.full_like(values, values.max())
    elif kind in "iu":
        for filling in _FILLINGS:
            valid = values != filling
            if valid.any():
                even = np.where(valid, values, values[valid][0])
                yield valid.astype(np.float64), even


def _replace_leaf(batch: Any, number: int, leaf: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)
