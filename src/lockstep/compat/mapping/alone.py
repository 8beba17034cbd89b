"""One device's part of a mapped function, run alone: for looking closer at it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lockstep.compat.mapping import devices
from lockstep.compat.mapping.options import Options, input_axes
from lockstep.compat.mapping.programs import Programs


class Alone:
    """The function of a `pmap`, mapped over any one of its devices.

    Args:
        fun: the function.
        options: those of the `pmap`.
    """

    def __init__(self, fun: Callable[..., Any], options: Options):
        self._fun, self._options = fun, options
        self._programs: dict[jax.Device, Programs] = {}

    @property
    def static(self) -> tuple[int, ...]:
        """The positions of the static arguments."""
        return self._options.static

    def devices(self, size: int) -> Sequence[jax.Device]:
        """The devices of this process that an axis of this size lies on."""
        return devices.mine(self._options)[:size]

    def size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The size of the mapped axis of these arguments."""
        leaves, axes, _ = self._split(args, kwargs)
        pairs = zip(leaves, axes, strict=True)
        return next(leaf.shape[axis] for leaf, axis in pairs if axis is not None)

    def part(
        self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one device, on the host, as an axis of size 1."""
        leaves, axes, tree = self._split(args, kwargs)
        parts = [
            leaf if axis is None else leaf[(slice(None),) * axis + (one,)]
            for one in [slice(position, position + 1)]
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        mapped, kwargs = jax.tree.unflatten(tree, parts)
        _, static = self._options.split(args)
        return tuple(self._options.join(mapped, static)), kwargs

    def __call__(
        self, device: jax.Device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run on one device, with arguments as `part` returns them."""
        if device not in self._programs:
            one = dataclasses.replace(
                self._options, devices=(device,), donated=(), axis_size=None
            )
            self._programs[device] = Programs(lambda: self._fun, one)
        programs = self._programs[device]
        with programs.records.compiles.paused():  # these are no compiles of the run
            return programs.use(self._fun, lambda run, x: run(x), args, kwargs)

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[int | None, ...], Any]:
        mapped, _ = self._options.split(args)
        leaves, tree = jax.tree.flatten((mapped, kwargs))
        return leaves, input_axes(self._options, mapped, kwargs), tree
