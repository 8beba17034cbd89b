"""The results of a padded call, computed again from its real rows alone.

Other filling rows cannot show a step that divides by the number of all rows: that
number stays. So the first padded batch also runs without its padding, on one device.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import placement, tree
from lockstep.jaxprs.primitives import DRAWS
from lockstep.jaxprs.varying import equations
from lockstep.placement import MaskedBatch

TOLERANCE = 1e-3  # far above rounding, and above what Adam makes of it in most leaves
TOLERANCE_16_BIT = 3e-2


def off(step: Any, placed: tuple[Any, ...], padded: Any) -> str | None:
    """What in the outputs is not as from the real rows alone, on one device.

    Args:
        step: the `ParallelStep`.
        placed: the placed arguments of a padded call; the last is the dict of keywords.
        padded: its outputs, on the host.
    """
    if jax.process_count() > 1:
        return None  # no process holds all rows
    if step.view == "device" and _draws(step, placed):
        return None  # the devices' own masks are not those of one device
    alone = step.on(first_device(step.mesh))
    *args, kwargs = without_padding(placed, alone.layout.multiple)
    try:
        exact = placement.to_host(alone(*args, **kwargs))
    except jax.errors.JaxRuntimeError:  # one device may be too small for it
        return None
    old = args[0] if alone.state_at else None
    if alone.state_at == "all":
        padded, exact = (padded,), (exact,)
    return first_difference(old, padded, exact)


def _draws(step: Any, placed: tuple[Any, ...]) -> bool:
    """Whether the step draws random numbers."""
    traced = step.trace(*placed[:-1], **placed[-1])
    return any(eqn.primitive.name in DRAWS for eqn in equations(traced.jaxpr.jaxpr))


def first_device(mesh: Mesh) -> Mesh:
    """A mesh of the same axes over one device."""
    devices = mesh.devices[(slice(1),) * mesh.devices.ndim]
    return Mesh(devices, mesh.axis_names)


def without_padding(placed: tuple[Any, ...], multiple: int) -> tuple[Any, ...]:
    """Arguments on the host with real rows only, but for what microbatches need."""

    def strip(argument: Any) -> Any:
        argument = placement.to_host(argument)
        if not isinstance(argument, MaskedBatch):
            return argument
        real = np.flatnonzero(argument.mask)
        return placement.pad_batch(placement.take_rows(argument.data, real), multiple)

    return tuple(strip(argument) for argument in placed)


def first_difference(state: Any, padded: Any, exact: Any) -> str | None:
    """The first number of a padded call that is not that of the real rows.

    Args:
        state: the old state, where the outputs hold a new one as `(state, ...)`;
            `None` for an evaluation step.
        padded: outputs of the padded call, on the host.
        exact: outputs of the call on the real rows, on the host.

    Returns:
        The path and both values, or `None`. Arrays with rows are not compared. A state
        counts as different when most of its numbers moved otherwise: single leaves
        without signal wander by rounding.
    """
    small = any(
        getattr(x, "dtype", np.dtype(float)).itemsize < 4
        for x in jax.tree.leaves((state, padded))
        if tree.is_array(x) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    )
    tolerance = TOLERANCE_16_BIT if small else TOLERANCE
    if state is not None:
        gap = _usual_gap(state, padded[0], exact[0])
        if gap > tolerance:
            return f"the update of the state is off by {gap:.3g} (relative)"
        padded, exact = padded[1:], exact[1:]
    named = zip(
        tree.named_leaves(padded, "output"), jax.tree.leaves(exact), strict=True
    )
    for (path, a), b in named:
        if tree.is_array(a) and np.ndim(a) == 0 and not tree.is_key(a):
            a, b = complex(a), complex(b)
            if abs(a - b) > tolerance * max(abs(a), abs(b), 1e-3):
                return f"{path} is {a.real:.6g} and not {b.real:.6g}"
    return None


def _usual_gap(old: Any, padded: Any, exact: Any) -> float:
    """The relative difference of the updates of a leaf: the median over all numbers."""
    gaps, sizes = [], []
    leaves = zip(*(jax.tree.leaves(x) for x in (old, padded, exact)), strict=True)
    for before, a, b in leaves:
        if not tree.is_array(a) or not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
            continue
        before, a, b = (np.asarray(x, np.float64) for x in (before, a, b))
        moved = max(np.linalg.norm(a - before), np.linalg.norm(b - before))
        rounding = 1e-5 * np.linalg.norm(before)  # a step too small for its dtype
        gaps.append(max(np.linalg.norm(a - b) - rounding, 0) / (moved or 1.0))
        sizes.append(a.size)
    if not gaps:
        return 0.0
    order = np.argsort(gaps)
    half = np.searchsorted(np.cumsum(np.take(sizes, order)), sum(sizes) / 2)
    return float(gaps[order[half]])
