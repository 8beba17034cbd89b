"""Printing from a mapped function, one line a device, in the devices' order."""

from typing import Any

import jax

from lockstep.printing import print_per_device


def debug_print(fmt: str, *values: Any, **named: Any) -> None:
    """`jax.debug.print` whose lines come in the order of the devices.

    JAX refuses `ordered=True` on more than one device, and without it the lines come
    as the devices reach them. Here the first device gathers the values and prints all
    lines, so every device waits for the slowest: it is for debugging.

    Args:
        fmt: a format string for `str.format`.
        *values: trees of arrays or numbers for its fields `{}`.
        **named: the same for its named fields.

    Example:
        >>> from lockstep.compat import pmap
        >>> f = pmap(lambda x: debug_print("x is {}", x), devices=jax.devices()[:2])
        >>> f(jax.numpy.arange(2)); jax.effects_barrier()
        device 0: x is 0
        device 1: x is 1
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        print_per_device(fmt, *values, **named)
    else:
        jax.debug.print(fmt, *values, **named)
