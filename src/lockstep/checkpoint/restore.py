"""A checkpoint into a state's own tree and layout: whole, or not at all."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.checkpoint.leaves import (
    Leaf,
    arrays_of,
    describe,
    differences,
    put_back,
)
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.store import Store
from lockstep.notices import say_once

_SHOWN = 6


def restore(store: Store, saved: Saved, state: Any) -> Any:
    """The saved values in the tree of `state`, each where its leaf lies.

    Nothing of `state` is changed or freed.

    Args:
        store: where the checkpoint is.
        saved: what was saved beside the arrays.
        state: arrays, or descriptions of them, of the wanted layout.

    Raises:
        ValueError: the saved state does not fit; lists the leaves by path.
        Damaged: the checkpoint cannot be read.
    """
    step, leaves, wanted = saved.step, saved.leaves, describe(state)
    places = arrays_of(state)
    if _are_stacked(leaves, wanted):
        return put_back(state, _unstacked(store, step, leaves, places), leaves)
    check_fits(leaves, wanted, store.path(step))
    like = {path: _like(leaves[path], place) for path, place in places.items()}
    return put_back(state, store.read(step, like), leaves)


def check_fits(saved: dict[str, Leaf], wanted: dict[str, Leaf], where: Path) -> None:
    """Raise a ValueError that lists what differs, by path."""
    found = differences(saved, wanted)
    if not found:
        return
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    raise ValueError(
        f"the checkpoint {where} is of another state, and nothing of it was loaded:\n  "
        + "\n  ".join(found[:_SHOWN] + more)
        + "\nUse the model and the optimizer that it was saved with, or another "
        "directory for a new run"
    )


def _are_stacked(saved: dict[str, Leaf], wanted: dict[str, Leaf]) -> bool:
    """Whether all that differs is that every saved leaf is a stack of copies."""
    if saved.keys() != wanted.keys():
        return False
    shapes = [(saved[path].shape, wanted[path].shape) for path in saved]
    heights = {
        old[:1] if old[1:] == new and len(old) > len(new) else None
        for old, new in shapes
        if old is not None and new is not None
    }
    return len(heights) == 1 and None not in heights


def _unstacked(
    store: Store, step: int, saved: dict[str, Leaf], places: dict[str, Any]
) -> dict[str, Any]:
    """Row 0 of every leaf, after a look at the other rows."""
    stacks = store.read(step, {p: _stack(saved[p], at) for p, at in places.items()})
    for path, stack in stacks.items():
        for number, copy in enumerate(stack):
            if copy.tobytes() != stack[0].tobytes():
                raise ValueError(
                    f"{path} in {store.path(step)} has a row for each of {len(stack)} "
                    f"devices, as pmap keeps them, and row {number} differs from row 0:"
                    " the copies no longer were one model; save one of them by itself"
                )
    say_once(
        f"stacked {store.directory}",
        f"{store.path(step)} holds equal copies of the state, one a device as pmap "
        "keeps them: the first is used",
    )
    return {p: _placed(stack[0], places[p]) for p, stack in stacks.items()}


def _placed(row: np.ndarray, place: Any) -> Any:
    if not _is_on_devices(place):
        return row
    # A CPU device borrows NumPy's memory, and the step takes the state's memory over.
    return jnp.copy(jax.device_put(row, place.sharding))


def _is_on_devices(place: Any) -> bool:
    return isinstance(place, (jax.Array, jax.ShapeDtypeStruct))


def _like(saved: Leaf, place: Any) -> Any:
    """What to read: the saved type, in the place of the wanted leaf."""
    dtype = _dtype(saved, place)
    if _is_on_devices(place):
        return jax.ShapeDtypeStruct(place.shape, dtype, sharding=place.sharding)
    return np.empty(place.shape, dtype)


def _stack(saved: Leaf, place: Any) -> np.ndarray:
    assert saved.shape is not None
    return np.empty((saved.shape[0], *place.shape), _dtype(saved, place))


def _dtype(saved: Leaf, place: Any) -> Any:
    return place.dtype if saved.impl else jnp.dtype(saved.form.partition("[")[0])
