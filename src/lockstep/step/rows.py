"""The rows of a batch: how many, which of them count, and how microbatches split them.

The mask of rows is looked for in two places, and both are multiplied: a `MaskedBatch`
holds one (padding), and a batch that is a dict may hold one of its own. The loss then
finds the product where its own mask was, so that a loss that reads its mask leaves
padding out without knowing of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.placement import MaskedBatch, count_rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch as a loss sees it, and what is known of its rows.

    Attributes:
        data: the user's batch, leaves `[B, ...]`.
        count: B, the rows with padding; a static integer.
        mask: weights `[B]` of the rows, or `None` when every row counts once.
        mask_path: where the user's own mask is, for messages.
        mask_rank: the rank of the user's own mask; 0 without one. A mask of rank 2 or
            more weighs smaller things than rows, and does not show in `mask`.
    """

    data: Any
    count: int
    mask: jax.Array | None
    mask_path: str
    mask_rank: int

    @property
    def weight(self) -> Any:
        """How many rows count: B, or the sum of the mask."""
        if self.mask is None:
            return self.count
        return jnp.sum(self.mask, dtype=jnp.promote_types(self.mask.dtype, jnp.float32))

    @property
    def finer(self) -> bool:
        """Whether the user's mask counts smaller things than rows, such as tokens."""
        return self.mask_rank > 1


def open_batch(batch: Any, mask_name: str | None = "mask") -> Rows:
    """Take the mask of rows out of a batch, or merge it into the user's own.

    Args:
        batch: a tree of `[B, ...]` arrays, or a `MaskedBatch` of one.
        mask_name: where a batch that is a dict holds its mask; `None`: nowhere.

    Raises:
        ValueError: no rows, unequal rows, or a mask without rows.

    Example:
        >>> padded = MaskedBatch({"x": jnp.ones((3, 2))}, jnp.array([1.0, 1.0, 0.0]))
        >>> rows = open_batch(padded)
        >>> rows.count, float(rows.weight), rows.data["mask"].shape
        (3, 2.0, (3,))
    """
    padding = batch.mask if isinstance(batch, MaskedBatch) else None
    data = batch.data if isinstance(batch, MaskedBatch) else batch
    count = count_rows(data)
    path = f"batch[{mask_name!r}]"
    if padding is not None:
        padding = jnp.asarray(padding)
    if mask_name is None or not isinstance(data, dict):
        return Rows(data, count, padding, path, 0)
    mask: Any = data.get(mask_name)
    rank = len(mask.shape) if tree.is_array(mask) else 0
    if mask is not None and rank == 0:
        raise ValueError(
            f"{path} has no rows: a mask is [B] or [B, ...]; give make_train_step "
            "mask=None if this is no mask"
        )
    if padding is None:
        return Rows(data, count, mask if rank == 1 else None, path, rank)
    merged = padding
    if mask is not None:
        merged = mask * jnp.reshape(padding, (-1,) + (1,) * (rank - 1))
    data = {**data, mask_name: merged}
    return Rows(data, count, merged if rank < 2 else padding, path, rank)


def split_microbatches(batch: Any, k: int) -> tuple[Any, Any]:
    """Split every leaf with rows into `[k, B / k, ...]`, for a scan over k.

    Microbatch j holds the rows j, j + k, j + 2 k, ...: with such a stride every device
    finds its part of each microbatch among its own rows, where a split into blocks
    would move almost all rows to other devices.

    Args:
        batch: a tree of `[B, ...]` arrays, or a `MaskedBatch` of one.
        k: the number of microbatches.

    Returns:
        The leaves that have rows, split, and a function that makes a batch again from
        one microbatch of them.

    Raises:
        ValueError: B does not divide by k.

    Example:
        >>> leaves, join = split_microbatches({"x": jnp.arange(6), "t": 0.5}, 2)
        >>> join([leaf[1] for leaf in leaves])
        {'t': 0.5, 'x': Array([1, 3, 5], dtype=int32)}
    """
    n = count_rows(batch)
    if n % k:
        below, above = n - n % k, n - n % k + k
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"the batch has {n} rows here and accumulate={k} microbatches need a "
            f"multiple of {k}: use {sizes} rows, or remainder='pad'"
        )
    leaves, structure = jax.tree.flatten(batch)
    has_rows = [tree.is_array(leaf) and len(leaf.shape) > 0 for leaf in leaves]

    def split(leaf: Any) -> jax.Array:
        return jnp.moveaxis(jnp.reshape(leaf, (n // k, k, *leaf.shape[1:])), 1, 0)

    def join(parts: list[Any]) -> Any:
        rest = iter(parts)
        both = zip(leaves, has_rows, strict=True)
        whole = [next(rest) if split_up else leaf for leaf, split_up in both]
        return jax.tree.unflatten(structure, whole)

    rows = zip(leaves, has_rows, strict=True)
    return [split(leaf) for leaf, split_up in rows if split_up], join
