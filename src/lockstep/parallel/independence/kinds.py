"""What a value inside a loss knows of the rows of a batch."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Free:
    """No row is in it: parameters, constants, and what is the same on all devices.

    Attributes:
        varies: the axes along which it may differ. A value that differs along the axis
            of the rows (positions, say) would meet other rows on another device.
        number: its value, where it is a literal.
    """

    varies: frozenset[int] = frozenset()
    number: float | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Each part along one axis comes from one row: `[B, ...]`, or `[B * T, ...]`.

    Attributes:
        axis: the axis; a row is one index of it, or a block of neighbours.
        mask: whether it is the mask of the rows itself.
    """

    axis: int
    mask: bool = False


@dataclasses.dataclass(frozen=True)
class Sum:
    """Every entry is a sum over all rows, so that the sums of two shards add up.

    Attributes:
        size: how many numbers were added up in each entry.
        mask: whether it is the sum of the mask.
        raised: whether it has a least value, as by `jnp.maximum(count, 1)`, so that the
            sums of two shards no longer add up.
    """

    size: int
    mask: bool = False
    raised: bool = False


@dataclasses.dataclass(frozen=True)
class Average:
    """Every entry is a mean over all rows; that of two equal shards is their mean.

    Attributes:
        masked: whether the rows are weighed by the mask, and divided by its sum.
        devices: the sum of such means over the devices, not divided yet.
    """

    masked: bool = False
    devices: bool = False


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Sums or means over all rows, multiplied, divided or in another bent function.

    A mean over the tokens that count is one, or the balance of experts. The mean of
    what two shards give is not that of all rows, but the rows of the first batch need
    not show it: their counts may be equal, or the difference small.

    Attributes:
        eqn: the product, the quotient or the function.
        caller: the call that it is in, as in `Met`.
    """

    eqn: Any
    caller: Any = None


@dataclasses.dataclass(frozen=True)
class RaisedCount:
    """The count of a `Mean`, with a least value in every shard."""


@dataclasses.dataclass(frozen=True)
class Met:
    """Rows meet in it, or it could not be seen that they do not.

    Attributes:
        eqn: the equation where they first do.
        caller: the call that it is in, for `jnp` functions are traced once and then
            know the line of their first use, or none.
    """

    eqn: Any
    caller: Any = None


Kind = Free | Rows | Sum | Average | Uneven | RaisedCount | Met
