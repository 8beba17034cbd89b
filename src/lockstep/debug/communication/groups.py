"""Which axis of a mesh a collective works along, from its groups of devices."""

import math
import re

import numpy as np

_MESH = re.compile(r"mesh\[(.*?)\] ?\{(.*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def axis_of(
    groups: str, shape: dict[str, int], *, pairs: bool = False
) -> tuple[str, int]:
    """The axes that a collective works along, and how many devices take part.

    Args:
        groups: `replica_groups` or `source_target_pairs` of a compiled text.
        shape: the axes of the mesh with their sizes.
        pairs: whether the groups are the moves of a permutation.

    Example:
        >>> axis_of("{{0,2,4,6},{1,3,5,7}}", {"data": 4, "model": 2})
        ('data', 4)
        >>> axis_of("[4,2]<=[8]", {"data": 4, "model": 2})
        ('model', 2)
        >>> axis_of("{}", {"data": 4, "model": 2})
        ('data, model', 8)
    """
    count = math.prod(shape.values())
    rows = read_groups(groups, count)
    if rows is None:
        return groups, count
    members = max(map(len, rows))
    places = [np.unravel_index(row, tuple(shape.values())) for row in rows]
    axes = [
        axis
        for i, axis in enumerate(shape)
        if any(len(set(place[i].tolist())) > 1 for place in places)
    ]
    whole = math.prod(shape[axis] for axis in axes)
    text = ", ".join(axes) or "no axis"
    if pairs or members == whole:
        return text, whole
    return f"part of {text}", members


def read_groups(text: str, count: int) -> list[list[int]] | None:
    """The groups as lists of positions in the mesh; `None` for an unknown notation."""
    if text == "{}":
        return [list(range(count))]
    if text.startswith("{{"):
        rows = re.findall(r"\{([\d,]+)\}", text)
        return [[int(n) for n in row.split(",")] for row in rows]
    if text.startswith("mesh"):
        return _mesh_groups(text, count)
    return _counted_groups(text)


def _counted_groups(text: str) -> list[list[int]] | None:
    """`[4,2]<=[2,4]T(1,0)`: count up, reshape, transpose, reshape."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        return None
    shape, counted, order = (
        [int(n) for n in part.split(",")] if part else [] for part in match.groups()
    )
    numbers = np.arange(math.prod(counted)).reshape(counted)
    return np.transpose(numbers, order or None).reshape(shape).tolist()


def _mesh_groups(text: str, count: int) -> list[list[int]] | None:
    """`mesh['data'=4,'model'=2] {'data'}`; `'data':(2)2` is a part of an axis.

    The part `(before)size` of an axis is its middle when it is split into
    `before x size x rest`.
    """
    match = _MESH.fullmatch(text)
    if not match or "device_ids" in text:
        return None
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", match[1])}
    parts = {name: (before, size) for name, before, size in _AXIS.findall(match[2])}
    if math.prod(sizes.values()) != count or not parts.keys() <= sizes.keys():
        return None
    shape, along = [], []
    for name, size in sizes.items():
        before, part = parts.get(name, ("1", "1"))
        before, part = int(before or 1), int(part or size)
        along.append(len(shape) + 1)
        shape += [before, part, size // (before * part)]
    numbers = np.moveaxis(np.arange(count).reshape(shape), along, range(-len(along), 0))
    return numbers.reshape(-1, math.prod(shape[i] for i in along)).tolist()
