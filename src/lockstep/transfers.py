"""What a step is handed from outside of its devices, and moves there in every call."""

import inspect
from typing import Any

import jax

from lockstep import tree


class NoTransfers:
    """An observer of steps that refuses arguments from elsewhere, by name.

    The state of the first call may come from anywhere: it is copied once.

    Raises:
        RuntimeError: in a call; names the argument, where it lies, and what to do.

    Example:
        >>> step = ls.parallelize(lambda w, x: (w + x.mean(), None))
        >>> step.observers.append(NoTransfers())
        >>> w, _ = step(0.0, step.place_batch(np.ones(8, np.float32)))
        >>> step(w, np.ones(8, np.float32))
        Traceback (most recent call last):
        ...
        RuntimeError: <lambda>: x (float32[8]) comes from the host in every call: ...
    """

    def __init__(self) -> None:
        self._called = False

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at where the arguments lie."""
        found = transfers(step, args, kwargs, first_call=not self._called)
        self._called = True
        if found:
            raise RuntimeError(f"{step.compiles.name}: {'; '.join(found[:3])}")

    def after(self, step: Any, outputs: Any) -> None:
        """All was in place."""


def transfers(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first_call: bool = False
) -> list[str]:
    """The arguments of a call that do not lie on the devices of its step, in words.

    Args:
        step: what `parallelize`, `per_device` or `compat.pmap` returned.
        args: its arguments.
        kwargs: its keyword arguments.
        first_call: whether the first argument, the state, may come from elsewhere.
    """
    devices, static = _devices(step, args, kwargs)
    names = _names(step, len(args))
    named = [
        (i, pair)
        for i, (name, argument) in enumerate(zip(names, args, strict=True))
        if i not in static and not (i == 0 and first_call)
        for pair in tree.named_leaves(argument, name)
    ]
    named += [(-1, p) for k, v in kwargs.items() for p in tree.named_leaves(v, k)]
    return [
        text
        for i, (path, leaf) in named
        if (text := _transfer(path, leaf, devices, i in _batches(step)))
    ]


def _transfer(path: str, leaf: Any, devices: set[Any], is_batch: bool) -> str | None:
    if tree.is_static(leaf):
        return None
    advice = "place it once, before the loop, with replicate(..., mesh)"
    if is_batch:
        advice = "prefetch(batches, step) places it ahead, in a thread"
    head = f"{path} ({tree.describe_leaf(leaf)})"
    if not isinstance(leaf, jax.Array):
        return f"{head} comes from the host in every call: {advice}"
    if leaf.sharding.device_set != devices:
        where = sorted(d.id for d in leaf.sharding.device_set)
        lies = f"device {where[0]} alone" if len(where) == 1 else f"devices {where}"
        return (
            f"{head} lies on {lies} and is copied to the {len(devices)} devices of the "
            f"step in every call: {advice}"
        )
    return None


def _devices(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[set[Any], tuple[int, ...]]:
    """Where a step runs, and which of its arguments are static."""
    if hasattr(step, "mesh"):
        return set(step.mesh.devices.flat), ()
    return set(step.alone.devices(step.alone.size(args, kwargs))), step.alone.static


def _batches(step: Any) -> tuple[int, ...]:
    return getattr(step, "batch_argnums", (1,))


def _names(step: Any, count: int) -> list[str]:
    try:
        names = list(inspect.signature(getattr(step, "fn", step)).parameters)
    except (TypeError, ValueError):
        names = []
    return names[:count] + [f"argument {i}" for i in range(len(names[:count]), count)]
