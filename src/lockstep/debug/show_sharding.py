"""`show_sharding`: which device holds which part of an array, drawn as a grid."""

import dataclasses
import html
from typing import Any

import jax

from lockstep.tables import as_text
from lockstep.tree import describe_leaf


@dataclasses.dataclass(frozen=True)
class ShardingPicture:
    """An array's parts and the devices that hold them; prints as text."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def show_sharding(array: jax.Array) -> ShardingPicture:
    """Draw which device holds which part of an array.

    One line for each block of the first axis that is split, one column for each block
    of the next; a device stands in the cell of its part, several where it is copied.

    Raises:
        TypeError: not an array of JAX: `shapes(tree)` lists a whole tree.

    Example:
        >>> mesh = ls.make_mesh({"data": 4, "model": 2})
        >>> show_sharding(ls.shard_batch(np.ones((8, 3), np.float32), mesh))
        float32[8,3] on 8 devices, [2,3] on each
        [0:2, :]  0 1
        [2:4, :]  2 3
        [4:6, :]  4 5
        [6:8, :]  6 7
    """
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"show_sharding draws one array of JAX, not a {type(array).__name__}: "
            "debug.shapes(tree) lists all leaves of a tree"
        )
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        block = tuple(s.indices(n)[:2] for s, n in zip(index, array.shape, strict=True))
        holders.setdefault(block, []).append(device.id)
    local = ",".join(map(str, array.sharding.shard_shape(array.shape)))
    count = len(array.sharding.device_set)
    head = f"{describe_leaf(array)} on {count} device{'s' * (count > 1)}"
    grid = _grid(holders, array.shape)
    return ShardingPicture(f"{head}, [{local}] on each\n{grid}")


def _grid(holders: dict[Any, list[int]], shape: tuple[int, ...]) -> str:
    """The cells, with the last split axis across."""
    split = [i for i in range(len(shape)) if len({b[i] for b in holders}) > 1]
    across = split[-1] if len(split) > 1 else None

    def label(block: Any) -> str:
        return (
            f"[{', '.join(_span(block, i, shape, across) for i in range(len(shape)))}]"
        )

    rows: dict[str, dict[str, str]] = {}
    for block in sorted(holders):
        column = "" if across is None else "{}:{}".format(*block[across])
        cell = " ".join(map(str, sorted(holders[block])))
        rows.setdefault(label(block), {})[column] = cell
    columns = list(next(iter(rows.values())))
    table = [[name, *(cells[c] for c in columns)] for name, cells in rows.items()]
    if across is not None:
        table.insert(0, ["", *columns])
    return as_text(table)


def _span(block: Any, i: int, shape: tuple[int, ...], across: int | None) -> str:
    if i == across:
        return "|"
    start, stop = block[i]
    return ":" if (start, stop) == (0, shape[i]) else f"{start}:{stop}"
