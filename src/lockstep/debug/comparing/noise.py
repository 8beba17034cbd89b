"""How far rounding alone moves the outputs of a step: measured, not guessed.

The step runs again on one device with every number moved by its last place. An output
that moves by as much as it changed carries no signal: the gradient of a convolution's
bias before BatchNorm is rounding and nothing else, and Adam makes a full step of it.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lockstep import tree
from lockstep.debug.comparing.trials import Call, Trial, as_numbers
from lockstep.jaxprs.varying import equations
from lockstep.parallel.views import key_shape
from lockstep.step import TrainState

ROUNDS = 4  # of a single number, two could agree by chance


def movement(
    trial: Trial, call: Call, known: dict[str, np.ndarray], calls: Iterable[Call]
) -> dict[str, float]:
    """How far each output moves when the call does: the largest 2-norm.

    What the leaves of the state were moved by themselves is taken off, so that their
    updates are compared.

    Args:
        trial: a step on its devices.
        call: the call that gave what is known.
        known: its outputs by their paths.
        calls: the moved calls.
    """
    before = old_values(trial, call)
    largest = dict.fromkeys(known, 0.0)
    for moved in calls:
        old = old_values(trial, moved)
        for out in trial(moved):
            gap = subtract(out.value, known[out.path])
            if out.in_state:
                gap = gap - subtract(old[out.path], before[out.path])
            largest[out.path] = max(largest[out.path], size(gap))
    return largest


def old_values(trial: Trial, call: Call) -> dict[str, np.ndarray]:
    """The leaves of the old state by their paths (none without a state)."""
    if 0 in trial.step.batch_argnums:
        return {}
    leaves = tree.named_leaves(call.args[0], "state")
    return {path: as_numbers(x) for path, x in leaves if not tree.is_static(x)}


def nudged(trial: Trial, call: Call) -> Iterable[Call]:
    """Calls whose states and batches differ from this one in the last place."""
    narrowest = _narrowest(trial.jaxpr(call))
    moved = (0, *trial.step.batch_argnums)
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        change = _changer(lambda x, rng=rng: _nudge(x, rng, narrowest))
        args = [change(x) if i in moved else x for i, x in enumerate(call.args)]
        yield Call(tuple(args), call.keywords)


def redrawn(trial: Trial, call: Call) -> Iterable[Call]:
    """Calls with other keys: in a `TrainState`, and in further arguments."""
    data = trial.step.batch_argnums
    if not isinstance(call.args[0], TrainState):
        data = (0, *data)
    for number in range(1, ROUNDS + 1):
        change = _changer(lambda x, n=number: _fold(x, n))
        args = [x if i in data else change(x) for i, x in enumerate(call.args)]
        if isinstance(call.args[0], TrainState):
            key = change(call.args[0].key)
            args[0] = dataclasses.replace(call.args[0], key=key)
        yield Call(tuple(args), change(call.keywords))


def wide(x: np.ndarray) -> np.ndarray:
    """Values as float64 (or complex128), so that differences are exact."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b in float64; infinity less itself is NaN, without a word."""
    with np.errstate(invalid="ignore"):
        return wide(a) - wide(b)


def size(x: np.ndarray) -> float:
    """The 2-norm of what is finite."""
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0)))


def _changer(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def leaf(x: Any) -> Any:
        return change(x) if tree.is_array(x) else x

    return lambda values: jax.tree.map(leaf, values)


def _nudge(x: Any, rng: np.random.Generator, narrowest: float) -> Any:
    """Move each number by up to its last place.

    Whole numbers stay: they are masks, labels and counts, and would mean something
    else. Numbers that the step reads as bfloat16 are moved by half a place of those.
    """
    if tree.is_key(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    values = wide(np.asarray(x))
    if np.array_equal(values, np.round(values)):
        return x
    place = max(float(jnp.finfo(x.dtype).eps), narrowest / 2)
    return (values * (1 + place * rng.uniform(-1, 1, x.shape))).astype(x.dtype)


def _narrowest(jaxpr: core.Jaxpr) -> float:
    """The spacing of the narrowest floating type in which a program computes."""
    types = {
        var.aval.dtype
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "dtype")
    }
    floats = [t for t in types if jnp.issubdtype(t, jnp.inexact)]
    return max((float(jnp.finfo(t).eps) for t in floats), default=0.0)


def _fold(x: Any, number: int) -> Any:
    shape = key_shape(x, "key")
    if shape is None or (not tree.is_key(x) and x.shape[-1] != 2):
        return x
    fold = jax.random.fold_in
    for _ in shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(x, number)
