"""Host values that all processes must share: the first state, a rate, a key.

`jit` takes different values on different processes without a word, and each process
then trains a model of its own.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import tree
from lockstep.distributed import agreement, session
from lockstep.notices import say_once

_SHOWN = 6  # numbers that a message shows
_CURE = (
    ". Every process must hold the same: make it from the same seed, or read it from "
    "the same file"
)


def same_values(values: Any, mesh: Mesh, name: str) -> Any:
    """The tree, made the same on every process of the mesh.

    Only leaves that do not lie on devices of several processes are looked at. Where
    they differ those of the first process are taken, and this is said.

    Args:
        values: any pytree.
        mesh: the devices; nothing is done where they belong to one process.
        name: how messages call the tree.

    Raises:
        RuntimeError: the trees are not alike, or `initialize(broadcast=False)`; names
            the first leaf that differs, and the odd process.
    """
    group = session.group_of(mesh)
    if len(group) < 2:
        return values
    leaves = _host_leaves(values, name)
    if not leaves:
        return values
    current = session.current()
    found = _difference(leaves, group, name)
    if found is None:
        return values
    difference, alike = found
    if not (alike and current and current.broadcast):
        raise RuntimeError(difference + _CURE)
    say_once(
        f"broadcast {name}",
        f"{difference}: all processes take the {name} of process {group[0]} "
        "(initialize(broadcast=False) makes this an error)",
    )
    return _broadcast(values, group)


def require_same(leaves: list[tuple[str, Any]], mesh: Mesh, name: str) -> None:
    """Refuse host values that differ between the processes of the mesh.

    Args:
        leaves: with their paths.
        mesh: the devices; nothing is done where they belong to one process, or under
            `initialize(check_data=False)`.
        name: how messages call the values.

    Raises:
        RuntimeError: names the first leaf that differs, and the odd process.
    """
    group, current = session.group_of(mesh), session.current()
    if len(group) == 1 or not leaves or (current and not current.check_data):
        return
    found = _difference(leaves, group, name)
    if found is not None:
        raise RuntimeError(found[0] + _CURE)


def _difference(
    leaves: list[tuple[str, Any]], group: tuple[int, ...], name: str
) -> tuple[str, bool] | None:
    """What differs first, in words, and whether only values do."""
    what = f"the values of {name}"
    bits = [agreement.digest(*_bits(leaf)) for _, leaf in leaves]
    paths = [path for path, _ in leaves]
    total = agreement.digest(repr(paths), repr(bits))
    totals = session.exchange(total, group, what=what)
    if totals is None or len(set(totals)) == 1:
        return None
    rows = [
        [path, tree.describe_leaf(leaf), own, _show(leaf)]
        for (path, leaf), own in zip(leaves, bits, strict=True)
    ]
    everybody = session.exchange(rows, group, what=what)
    return _first_difference(everybody or [rows], group)


def _host_leaves(values: Any, name: str) -> list[tuple[str, Any]]:
    return [
        (path, leaf)
        for path, leaf in tree.named_leaves(values, name)
        if _is_local(leaf) and (not tree.is_static(leaf) or _is_plain(leaf))
    ]


def _is_plain(leaf: Any) -> bool:
    """Whether a static leaf shows its value; a function shows its address."""
    return isinstance(leaf, (bool, str, bytes))


def _is_local(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _bits(leaf: Any) -> tuple[Any, ...]:
    leaf = tree.as_host(leaf)
    if tree.is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return str(leaf.dtype), np.asarray(leaf)
    return (leaf,)


def _show(leaf: Any) -> str:
    if tree.is_static(leaf):
        return repr(leaf)
    (*_, value) = _bits(leaf)
    if np.size(value) == 1:
        return f"{np.asarray(value).item()!r}"
    return np.array2string(np.ravel(value)[:_SHOWN], threshold=_SHOWN) + (
        "..." if np.size(value) > _SHOWN else ""
    )


def _first_difference(everybody: list[Any], group: tuple[int, ...]) -> tuple[str, bool]:
    """The first leaf that is not the same, in words; whether only values differ."""
    forms = [[row[:2] for row in rows] for rows in everybody]
    odd, usual = agreement.odd_one(forms)
    alike = odd is None
    if odd is not None:
        mine, others = (dict(forms[i]) for i in (odd, usual))
        paths = [*mine, *(path for path in others if path not in mine)]
        path = next(p for p in paths if mine.get(p) != others.get(p))
        values = mine.get(path, "no such leaf"), others.get(path, "no such leaf")
    else:
        for rows in zip(*everybody, strict=True):
            odd, usual = agreement.odd_one([bits for _, _, bits, _ in rows])
            if odd is not None:
                break
        assert odd is not None, "the digests differ, and no leaf does"
        path, values = rows[0][0], (rows[odd][3], rows[usual][3])
    return (
        f"{path} differs between the processes: process {group[odd]} has {values[0]}, "
        f"process {group[usual]} has {values[1]}",
        alike,
    )


def _broadcast(values: Any, group: tuple[int, ...]) -> Any:
    """The first process's host leaves, bit for bit, on all processes."""
    from jax.experimental import multihost_utils

    is_source = jax.process_index() == group[0]

    def send(leaf: Any) -> Any:
        if tree.is_static(leaf) or not _is_local(leaf):
            return leaf
        leaf = tree.as_host(leaf)
        if tree.is_key(leaf):
            words = send(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(flat, is_source))
        value = sent.astype(np.uint8).view(host.dtype).reshape(host.shape)
        is_number = not hasattr(leaf, "dtype") or getattr(leaf, "weak_type", False)
        return value.item() if is_number and value.shape == () else value

    return jax.tree.map(send, values)
