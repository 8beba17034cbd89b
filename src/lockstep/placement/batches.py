"""The rows of a batch split over the devices of one mesh axis.

Rows go from the host straight to their device; nothing passes through device 0. Of
several processes each places its own rows, on its own devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lockstep import sharding, tree
from lockstep.devices import make_mesh
from lockstep.distributed.lookout import MAIN
from lockstep.distributed.session import group_of
from lockstep.notices import say_once
from lockstep.placement import spreading
from lockstep.placement.host_batches import (
    REMAINDERS,
    MaskedBatch,
    check_batch,
    count_rows,
    fill_up,
    take_rows,
)
from lockstep.placement.leaves import ready
from lockstep.placement.row_shares import Ended, Shares, share_rows


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
        batch: a tree of `[B, ...]` arrays (NumPy, torch, TensorFlow, JAX), with the
            rows of this process. Leaves of rank 0 have no rows and are replicated;
            `None` and `bool` pass through.
        mesh: the devices; all of them when `None`.
        axis_name: the mesh axis that splits the rows: "data" if there are several.
        remainder: what to do with rows that do not divide: `"error"`; `"pad"` (the
            result is a `MaskedBatch`); `"drop"` (the result is `None` when no row
            is left); `"unsplit"` (every device holds the whole short batch).
        multiple: each device's rows must divide by this (microbatches, shards).
        at_least: rows that a padded batch has at least, so that the short last batch
            of an epoch gets the shape of the full ones.

    Raises:
        ValueError: no rows, unequal rows, text leaves, rows that do not divide, or
            processes with unequal rows under `"error"`.

    Example:
        >>> mesh = make_mesh()
        >>> tuple(shard_batch({"x": np.ones((16, 3))}, mesh)["x"].sharding.spec)
        ('data',)
        >>> shard_batch({"x": np.ones((5, 3))}, mesh, remainder="pad").mask.sum()
        Array(5., dtype=float32)
    """
    mesh = make_mesh() if mesh is None else mesh
    layout = Layout(mesh, sharding.row_axis(mesh, axis_name), multiple)
    return place_batch(batch, layout, remainder, at_least=at_least)[0]


class Layout(NamedTuple):
    """Where rows go: along one axis of a mesh, a multiple of so many to each device."""

    mesh: Mesh
    axis_name: str
    multiple: int = 1


class Unplaced(NamedTuple):
    """A batch that must be gathered from all processes, on their main threads."""

    batch: Any
    shares: Shares

    def place(self, layout: Layout) -> Any:
        """Place it now: all rows on every device."""
        target = max(self.shares.counts)
        padded = fill_up(self.batch, self.shares.own, self.shares.shards, target)
        rows = self.shares.whole(len(padded.mask))
        by_rows = sharding.rows(layout.mesh, layout.axis_name)
        data = _put_rows(padded.data, by_rows, rows)
        index = self.shares.real_rows(len(padded.mask), layout.mesh, layout.axis_name)
        return spreading.take_everywhere(data, index, layout.mesh)


def agree_on_rows(
    batch: Any,
    layout: Layout,
    *,
    note: Any = None,
    channel: str = MAIN,
    cancelled: Callable[[], bool] | None = None,
) -> Shares | None:
    """The rows that each process brings; see `share_rows`."""
    rows, constants = 0, None
    if not isinstance(batch, Ended):
        rows = count_rows(batch.data if isinstance(batch, MaskedBatch) else batch)
    if rows and len(group_of(layout.mesh)) > 1:
        constants = [
            [path, repr(leaf)]
            for path, leaf in tree.named_leaves(batch, "batch")
            if not np.ndim(leaf) and not callable(leaf)
        ]
    return share_rows(
        rows,
        layout.mesh,
        layout.axis_name,
        constants=constants,
        note=note,
        channel=channel,
        cancelled=cancelled,
    )


def place_batch(
    batch: Any,
    layout: Layout,
    remainder: str,
    *,
    at_least: int = 0,
    shares: Shares | None = None,
    ahead: bool = False,
) -> tuple[Any, Shares]:
    """What `shard_batch` returns, and the rows that each process brought.

    Args:
        batch: as in `shard_batch`, or `Ended`.
        layout: where the rows go.
        remainder: as in `shard_batch`.
        at_least: global rows that a padded batch has at least.
        shares: agreed on beforehand, or `None`.
        ahead: called beside the main thread, where no collective may run: what needs
            one comes back as `Unplaced`.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder={remainder!r} is not one of {REMAINDERS}")
    by_rows = sharding.rows(layout.mesh, layout.axis_name)
    if isinstance(batch, MaskedBatch):
        batch = MaskedBatch(check_batch(batch.data), batch.mask)
        remainder = "error"
    elif not isinstance(batch, Ended):
        batch = check_batch(batch)
    shares = shares or agree_on_rows(batch, layout)
    assert shares is not None
    data = batch.like if isinstance(batch, Ended) else batch
    need = shares.shards * layout.multiple
    if remainder == "pad":
        at_least = max(*shares.counts, shares.of_whole(at_least))
        padded = fill_up(data, shares.own, need, at_least)
        return _put_rows(padded, by_rows, shares.whole(len(padded.mask))), shares
    rows = min(shares.counts)
    left_over = rows % need
    if not left_over and shares.equal:
        return _put_rows(data, by_rows, shares.whole(rows)), shares
    if remainder == "error":
        raise ValueError(_does_not_fit(data, layout, shares))
    if remainder == "drop":
        return _put_some(data, by_rows, rows - left_over, need, shares), shares
    if len(shares.processes) == 1:
        return _put_rows(data, sharding.replicated(layout.mesh), rows), shares
    unplaced = Unplaced(data, shares)
    return (unplaced if ahead else unplaced.place(layout)), shares


def _put_rows(batch: Any, where: NamedSharding, rows: int) -> Any:
    """Place leaves with rows at `where`, and the others on every device.

    All leaves go in one `device_put`, which costs less than one a leaf. `rows` counts
    those of all processes.
    """
    everywhere = sharding.replicated(where.mesh)
    named = tree.named_leaves(batch, "batch")
    moving = [i for i, (_, leaf) in enumerate(named) if not tree.is_static(leaf)]
    places = [where if np.ndim(named[i][1]) else everywhere for i in moving]
    values = [ready(named[i][1], where, named[i][0]) for i in moving]
    leaves = [leaf for _, leaf in named]
    if where.is_fully_addressable:
        placed = jax.device_put(values, places)
    else:
        several = zip(values, places, strict=True)
        placed = [spreading.place(leaf, place, rows) for leaf, place in several]
    for i, leaf in zip(moving, placed, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _put_some(
    batch: Any, by_rows: NamedSharding, kept: int, need: int, shares: Shares
) -> Any:
    """The first rows of a batch, as many as divide; `None` for none."""
    rows = shares.whole(need)
    say_once(
        "dropped rows",
        f"remainder='drop': the last {max(shares.counts) - kept} of "
        f"{max(shares.counts)} rows of a batch are left out, for {rows} rows make a "
        "whole part on every device (further drops are not reported; "
        "step.dropped_rows counts them)",
    )
    if not kept:
        return None
    return _put_rows(take_rows(batch, slice(kept)), by_rows, shares.whole(kept))


def _does_not_fit(batch: Any, layout: Layout, shares: Shares) -> str:
    path = next(
        path
        for path, leaf in tree.named_leaves(batch, "batch")
        if tree.is_array(leaf) and len(leaf.shape)
    )
    if not shares.equal:
        return (
            f"{path} has unequal rows: {shares}. The mean over the whole batch needs "
            "equal parts: use remainder='pad', which is exact, or give every process "
            "as many rows"
        )
    n, need = shares.own, shares.shards * layout.multiple
    below, above = n - n % need, n - n % need + need
    sizes = f"{below} or {above}" if below else f"{above}"
    micro = ""
    if layout.multiple > 1:
        micro = f" times {layout.multiple} microbatches or shards"
    whose = "" if len(shares.processes) == 1 else " of this process"
    return (
        f"{path} has {n} rows; the {shares.shards} devices on {layout.axis_name!r}"
        f"{whose}{micro} need a multiple of {need}: use remainder='pad', or {sizes} "
        "rows"
    )
