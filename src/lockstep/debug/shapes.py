"""A tree as a table: path, shape, shape on one device, spec, bytes."""

import dataclasses
import math
from typing import Any

import jax

from lockstep import tables, tree

_HEAD = ("leaf", "type", "on one device", "spec", "bytes a device")


@dataclasses.dataclass(frozen=True)
class ShapeTable:
    """The rows of `shapes`; prints as text, and as a table in a notebook."""

    rows: tuple[tuple[str, str, str, str, int], ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes that the tree takes on each device."""
        return sum(row[-1] for row in self.rows)

    def __str__(self) -> str:
        """The table as aligned text, with a total."""
        lines = [_HEAD, *((*r[:4], f"{r[4]:,}") for r in self.rows)]
        lines.append(("total", "", "", "", f"{self.bytes_per_device:,}"))
        return tables.as_text(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return tables.as_html(_HEAD, self.rows)


def shapes(values: Any, name: str = "tree") -> ShapeTable:
    """Path, global shape, per-device shape, partition spec and bytes of every leaf.

    Example:
        >>> import numpy as np
        >>> from lockstep import make_mesh, shard_batch
        >>> x = shard_batch(np.ones((16, 3), np.float32), make_mesh())
        >>> print(shapes(x, "batch"))
        leaf   type           on one device  spec         bytes a device
        batch  float32[16,3]  [2,3]          P('data',)   24
        total                                             24
    """
    named = tree.named_leaves(values, name)
    return ShapeTable(tuple(_row(path, leaf) for path, leaf in named))


def _row(path: str, leaf: Any) -> tuple[str, str, str, str, int]:
    kind = tree.describe_leaf(leaf)
    if not isinstance(leaf, jax.Array):
        return path, kind, "", "host" if tree.is_array(leaf) else "static", 0
    local = leaf.sharding.shard_shape(leaf.shape)
    spec = getattr(leaf.sharding, "spec", None)
    where = "one device" if spec is None else f"P{tuple(spec)}"
    size = math.prod(local) * leaf.dtype.itemsize
    return path, kind, f"[{','.join(map(str, local))}]", where, size
