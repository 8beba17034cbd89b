"""Print from inside a step: one line a device, in the order of the devices."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer


def print_per_device(fmt: str, *values: Any, **named: Any) -> None:
    """Print what each device holds, one line a device, in order.

    Under `per_device` and `compat.pmap` these are the device's own values; under
    `parallelize` the part of each array that lies on the device. JAX refuses
    `jax.debug.print(ordered=True)` on more than one device, and without it the lines
    come as the devices reach them. Here one device gathers the values and prints all
    lines, so every device waits for the slowest: it is for debugging.

    Args:
        fmt: a format string for `str.format`.
        *values: trees of arrays or numbers for its fields `{}`.
        **named: the same for its named fields.

    Example:
        >>> mesh = ls.make_mesh(devices=jax.devices()[:2])
        >>> def step(w, x):
        ...     print_per_device("x is {}", x)
        ...     return w, x.sum()
        >>> _ = ls.parallelize(step, mesh)(0.0, np.arange(4.0)); jax.effects_barrier()
        device 0: x is [0. 1.]
        device 1: x is [2. 3.]
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        _print_mapped(fmt, values, named, axes)
    else:
        _print_parts(fmt, values, named)


def _print_mapped(fmt: str, values: Any, named: Any, axes: Iterable[str]) -> None:
    """Inside a map: every device has values of its own."""
    axes = tuple(axes)
    index = lax.axis_index(axes)

    def show(index: Any, rows: Any) -> None:
        if index:  # every device has all rows; the first one prints
            return
        for device in rows[0]:
            _, values, named = jax.tree.map(lambda leaf, d=device: leaf[d], rows)
            print(f"device {device}: {fmt.format(*values, **named)}")

    jax.debug.callback(show, index, lax.all_gather((index, values, named), axes))


def _print_parts(fmt: str, values: Any, named: Any) -> None:
    """Outside of a map: each array is whole, and the compiler has split it."""
    leaves, structure = jax.tree.flatten((values, named))
    where: list[Any] = [getattr(leaf, "sharding", None) for leaf in leaves]

    def show(leaves: list[Any]) -> None:
        devices = {d for s in where if s is not None for d in s.device_set}
        for device in sorted(devices, key=lambda d: d.id) or [None]:
            parts = [_part(x, s, device) for x, s in zip(leaves, where, strict=True)]
            values, named = jax.tree.unflatten(structure, parts)
            name = "host" if device is None else f"device {device.id}"
            print(f"{name}: {fmt.format(*values, **named)}")

    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        show(leaves)
        return
    for i, leaf in enumerate(leaves):
        where[i] = None
        if isinstance(leaf, Tracer):  # the compiler tells when it has decided
            note = _note(where, i)
            jax.debug.inspect_array_sharding(leaf, callback=note)
    jax.debug.callback(show, leaves)


def _note(where: list[Any], i: int) -> Any:
    def note(sharding: Any) -> None:
        where[i] = sharding

    return note


def _part(leaf: Any, sharding: Any, device: Any) -> Any:
    """What a device holds of an array; a number, or what lies elsewhere, is whole."""
    if sharding is None or device not in sharding.device_set:
        return leaf
    return leaf[sharding.devices_indices_map(leaf.shape)[device]]
