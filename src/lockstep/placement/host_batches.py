"""A batch on the host: its rows counted, checked, taken and filled up."""

import dataclasses
from typing import Any

import jax
import numpy as np

from lockstep import tree

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
    return fill_up(batch, count_rows(batch), multiple, at_least)


def fill_up(batch: Any, real: int, multiple: int, at_least: int = 0) -> MaskedBatch:
    """`pad_batch` of the first `real` rows of a checked batch; of none, if need be."""
    rows = max(real, at_least)
    rows += -rows % multiple
    mask = np.zeros(rows, np.float32)
    mask[:real] = 1
    if rows == real == count_rows(batch):
        return MaskedBatch(batch, mask)
    index = np.minimum(np.arange(rows), max(real - 1, 0))
    return MaskedBatch(take_rows(batch, index), mask)


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
