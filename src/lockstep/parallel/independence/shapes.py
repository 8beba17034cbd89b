"""Where the axis of the rows goes when an operation moves values about."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.jaxprs.primitives import ELEMENTWISE
from lockstep.parallel.independence.kinds import (
    Average,
    Free,
    Kind,
    Met,
    Rows,
    Sum,
    Uneven,
)


def all_axes(var: Any) -> frozenset[int]:
    """The axes along which a value may differ, when nothing is known."""
    shape = getattr(var.aval, "shape", ())
    return frozenset(axis for axis, size in enumerate(shape) if size != 1)


def same_shape(eqn: Any) -> bool:
    """Whether every input that is no scalar has the shape of the output."""
    shape = eqn.outvars[0].aval.shape
    return all(var.aval.shape in ((), shape) for var in eqn.invars)


def common_rows(kinds: Sequence[Kind]) -> int | None:
    """The axis on which all values have their rows; `None` if they do not agree."""
    rows = {kind.axis for kind in kinds if isinstance(kind, Rows)}
    if len(rows) != 1:
        return None
    (axis,) = rows
    for kind in kinds:
        if isinstance(kind, Free) and axis in kind.varies:
            return None
        if not isinstance(kind, (Free, Rows)):
            return None
    return axis


def free(eqn: Any, kinds: Sequence[Any]) -> Free:
    """What comes of values in which there are no rows."""
    out, name = eqn.outvars[0], eqn.primitive.name
    if name == "iota":
        return Free(frozenset({eqn.params["dimension"]}))
    if name == "convert_element_type":
        return kinds[0]
    varies = frozenset().union(*(kind.varies for kind in kinds))
    if not varies and kinds:
        return Free()
    if name == "broadcast_in_dim":
        dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
        return Free(frozenset(dims[i] for i in varies if shape[i] != 1))
    if name == "transpose":
        order = eqn.params["permutation"]
        return Free(frozenset(order.index(axis) for axis in varies))
    pointwise = same_shape(eqn) and name in ELEMENTWISE
    return Free(varies if pointwise else all_axes(out))


def rearranged(eqn: Any, kinds: Sequence[Kind]) -> Kind | None:
    """Sums and means over rows in another order or shape stay what they are."""
    if (
        eqn.primitive.name
        not in (
            "broadcast_in_dim reshape squeeze transpose expand_dims slice concatenate "
            "rev split dynamic_slice stack"
        ).split()
    ):
        return None
    arrays = kinds[:1] if eqn.primitive.name == "dynamic_slice" else kinds
    first = arrays[0]
    same = all(kind == first for kind in arrays)
    return first if same and isinstance(first, (Sum, Average, Uneven)) else None


def moved_rows(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """The axis of the rows in the output; `None` if they do not stay apart."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, kinds, rows) if rule else None


def dot_over_rows(eqn: Any, kinds: Sequence[Kind]) -> Sum | None:
    """A product that is contracted over the rows is a sum over them."""
    (left, right), _ = eqn.params["dimension_numbers"]
    size = math.prod(eqn.invars[0].aval.shape[axis] for axis in left)
    a, b = kinds
    if isinstance(a, Rows) and isinstance(b, Rows):
        pairs = zip(left, right, strict=True)
        return Sum(size) if (a.axis, b.axis) in pairs else None
    for one, axes, other, other_axes in ((a, left, b, right), (b, right, a, left)):
        if isinstance(one, Rows) and isinstance(other, Free) and one.axis in axes:
            varies = other_axes[list(axes).index(one.axis)] in other.varies
            return None if varies else Sum(size)
    return None


def inside_scan(eqn: Any, kind: Kind) -> Kind:
    """One round's part of a scanned input."""
    if isinstance(kind, Rows):
        return Met(eqn) if kind.axis == 0 else Rows(kind.axis - 1)
    if isinstance(kind, Free):
        return Free(frozenset(axis - 1 for axis in kind.varies if axis))
    return kind


def outside_scan(eqn: Any, kind: Kind) -> Kind:
    """The stack of what each round gave."""
    if isinstance(kind, Rows):
        return Rows(kind.axis + 1)
    if isinstance(kind, Free):
        return Free(frozenset({0, *(axis + 1 for axis in kind.varies)}))
    return kind


def _broadcast(eqn: Any, kinds: Sequence[Any], rows: int) -> int | None:
    axis = common_rows(kinds[:1])
    if axis is None:
        return None
    before, after = _shape(eqn), eqn.outvars[0].aval.shape
    to = eqn.params["broadcast_dimensions"][axis]
    return to if before[axis] == after[to] else None


def _reshape(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """`[B, T]` to `[B * T]` and back; the rows stay the slowest index."""
    axis = common_rows(kinds[:1])
    if axis is None:
        return None
    before, after = _shape(eqn), eqn.outvars[0].aval.shape
    for to, size in enumerate(after):
        if size % rows == 0 and math.prod(after[:to]) == math.prod(before[:axis]):
            return to
    return None


def _squeeze(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    axis, gone = common_rows(kinds), eqn.params["dimensions"]
    if axis is None or axis in gone:
        return None
    return axis - sum(d < axis for d in gone)


def _transpose(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    axis = common_rows(kinds)
    return None if axis is None else eqn.params["permutation"].index(axis)


def _same_size(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """Cuts, padding and turns, along the other axes only."""
    axis = common_rows(kinds[:1])
    if axis is None or any(not isinstance(kind, Free) for kind in kinds[1:]):
        return None
    turned = axis in eqn.params.get("dimensions", ())
    moved = "padding_config" in eqn.params and any(eqn.params["padding_config"][axis])
    whole = eqn.outvars[0].aval.shape[axis] == _shape(eqn)[axis]
    return axis if whole and not turned and not moved else None


def _concatenate(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    axis = common_rows(kinds)
    return None if axis == eqn.params["dimension"] else axis


def _stack(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    axis = common_rows(kinds)
    return None if axis is None else axis + (eqn.params["axis"] <= axis)


def _split(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    axis = common_rows(kinds)
    return None if axis == eqn.params["axis"] else axis


def _dot(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """Batch axes come first in the output, then those of the left, then the right."""
    contracted, batched = eqn.params["dimension_numbers"]
    places: set[int] = set()
    for side, kind in enumerate(kinds):
        axes = range(len(eqn.invars[side].aval.shape))
        own = [a for a in axes if a not in (*contracted[side], *batched[side])]
        skip = 0
        if side:
            left = len(eqn.invars[0].aval.shape)
            skip = left - len(contracted[0]) - len(batched[0])
        if isinstance(kind, Free):
            continue
        if not isinstance(kind, Rows) or kind.axis in contracted[side]:
            return None
        if kind.axis in batched[side]:
            place = list(batched[side]).index(kind.axis)
            other, there = kinds[1 - side], batched[1 - side][place]
            if isinstance(other, Free) and there in other.varies:
                return None
        else:
            place = len(batched[side]) + skip + own.index(kind.axis)
        places.add(place)
    return places.pop() if len(places) == 1 else None


def _convolution(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    numbers = eqn.params["dimension_numbers"]
    axis = common_rows(kinds[:1])
    apart = axis == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1
    return numbers.out_spec[0] if apart and isinstance(kinds[1], Free) else None


def _window(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """Pooling, along the other axes only."""
    axis = common_rows(kinds[:1])
    if axis is None:
        return None
    sizes = eqn.params["window_dimensions"], eqn.params["window_strides"]
    return axis if all(size[axis] == 1 for size in sizes) else None


def _gather(eqn: Any, kinds: Sequence[Kind], rows: int) -> int | None:
    """A table read at each row's indices; or each row at its own, or at fixed ones."""
    numbers = eqn.params["dimension_numbers"]
    table, indices = kinds
    out_rank = len(eqn.outvars[0].aval.shape)
    by_index = [d for d in range(out_rank) if d not in numbers.offset_dims]
    if isinstance(table, Free):
        axis = common_rows([indices])
        if axis is None or axis >= len(by_index):
            return None
        pairs = zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
        varies = any(to == axis and d in table.varies for d, to in pairs)
        return None if varies else by_index[axis]
    axis = common_rows([table])
    if axis is None:
        return None
    if axis in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(axis)
        there = numbers.start_indices_batching_dims[place]
        apart = isinstance(indices, (Rows, Free)) and (
            common_rows([indices]) == there
            if isinstance(indices, Rows)
            else there not in indices.varies
        )
        return by_index[there] if apart else None
    whole = eqn.params["slice_sizes"][axis] == _shape(eqn)[axis]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if not (whole and isinstance(indices, Free)) or axis in gone:
        return None
    kept = [d for d in range(len(_shape(eqn))) if d not in gone]
    return numbers.offset_dims[kept.index(axis)]


def _shape(eqn: Any) -> tuple[int, ...]:
    return eqn.invars[0].aval.shape


_RULES: dict[str, Callable[[Any, Sequence[Kind], int], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _same_size,
    "dynamic_slice": _same_size,
    "pad": _same_size,
    "rev": _same_size,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _window,
    "reduce_window_sum": _window,
    "reduce_window": _window,
    "gather": _gather,
}
