"""The options of one `pmap`: read once, checked once."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

UNNAMED = "_pmap_axis"


@dataclass(frozen=True, eq=False)
class Options:
    """The options of one `pmap`, read once.

    Attributes:
        axis_name: the name of the mapped axis.
        in_axes: an axis, `None`, or a tree of them, a prefix of the arguments.
        out_axes: the same for the results.
        static: positions of the arguments that are part of the program.
        donated: positions, among the arguments that are not static, of those whose
            memory the results may take.
        devices: the devices to map over, of all processes; `None` for the default.
        backend: the platform of the default devices.
        axis_size: the size of the mapped axis over all processes, if it was given.
    """

    axis_name: str
    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]
    devices: tuple[jax.Device, ...] | None
    backend: str | None
    axis_size: int | None

    def key(self) -> Hashable:
        """What two mappings of one function must share to share their programs."""
        trees = [
            (tuple(leaves), tree)
            for leaves, tree in map(_flatten_axes, (self.in_axes, self.out_axes))
        ]
        rest = self.static, self.donated, self.devices, self.backend, self.axis_size
        return self.axis_name, *trees, *rest

    @property
    def mapped_in_axes(self) -> Any:
        """`in_axes` without the entries of the static arguments."""
        if not (self.static and isinstance(self.in_axes, tuple)):
            return self.in_axes
        return tuple(a for i, a in enumerate(self.in_axes) if i not in self.static)

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The mapped arguments, and the static ones."""
        if not self.static:
            return args, ()
        if self.static[-1] >= len(args):
            raise ValueError(
                f"pmapped function has static_broadcasted_argnums={self.static} but "
                f"was called with only {len(args)} positional argument"
                f"{'s' * (len(args) != 1)}. All static broadcasted arguments must be "
                "passed positionally."
            )
        static = tuple(args[i] for i in self.static)
        for position, value in zip(self.static, static, strict=True):
            _check_hashable(position, value)
        return tuple(a for i, a in enumerate(args) if i not in self.static), static

    def join(self, mapped: Sequence[Any], static: Sequence[Any]) -> list[Any]:
        """All positional arguments again, each in its place."""
        args = list(mapped)
        for position, value in zip(self.static, static, strict=True):
            args.insert(position, value)
        return args


def read_options(
    axis_name: Hashable,
    in_axes: Any,
    out_axes: Any,
    static: int | Iterable[int],
    donated: int | Iterable[int],
    devices: Sequence[jax.Device] | None,
    backend: str | None,
    axis_size: int | None,
) -> Options:
    """Checks the options of `pmap` and brings each into one form."""
    if devices is not None and not len(devices):
        raise ValueError("'devices' argument to pmap must be non-empty, or None.")
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(
            f"pmap axis_name must be a string, not {axis_name!r}: JAX names the axes "
            "of a mesh by strings"
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for axis in jax.tree.leaves(axes):
            if type(axis) is not int or axis < 0:
                raise TypeError(
                    f"pmap {name} must be an int, None, or (nested) container with "
                    f"those types as leaves, no axis negative, but got {axes}."
                )
    static, donated = _positions(static), _positions(donated)
    if shared := set(static) & set(donated):
        raise ValueError(f"pmap cannot donate its static arguments {sorted(shared)}")
    return Options(
        axis_name=UNNAMED if axis_name is None else axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static=static,
        donated=tuple(i - sum(s < i for s in static) for i in donated),
        devices=None if devices is None else tuple(devices),
        backend=backend,
        axis_size=axis_size,
    )


def spread(axes: Any, over: Any, what: str) -> tuple[int | None, ...]:
    """One axis for every leaf of `over`, of which the tree `axes` is a prefix."""
    try:
        spread_axes = jax.tree.broadcast(axes, over, _is_none)
    except ValueError as error:
        text = str(error).replace("broadcast_prefix prefix_tree", what)
        raise ValueError(text) from None
    leaves = jax.tree.leaves(over, _is_none)  # here None is an axis, there no leaf
    pairs = zip(_flatten_axes(spread_axes)[0], leaves, strict=True)
    return tuple(axis for axis, leaf in pairs if leaf is not None)


def input_axes(
    options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, ...]:
    """The mapped axis of every leaf of `(args, kwargs)`, static arguments left out."""
    try:
        return spread((options.mapped_in_axes, 0), (args, kwargs), "pmap in_axes")
    except ValueError as error:
        by_name = (
            " Arguments passed by keyword are not part of that tuple: each argument "
            "passed by keyword is mapped over its leading axis."
        )
        raise ValueError(
            f"{error}\n\nin_axes must be a tree prefix of the tuple of arguments that "
            f"pmap is called with by position.{by_name if kwargs else ''}"
        ) from None


def _positions(argnums: int | Iterable[int]) -> tuple[int, ...]:
    found = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(i < 0 for i in found):
        raise ValueError(f"pmap counts arguments from the left, from 0, not {argnums}")
    return tuple(sorted(set(found)))


def _check_hashable(position: int, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            "Non-hashable static arguments are not supported, as this can lead to "
            f"unexpected cache-misses. Static argument {position} is of type "
            f"{type(value).__name__}: {error}"
        ) from None


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _flatten_axes(axes: Any) -> tuple[list[int | None], PyTreeDef]:
    return jax.tree.flatten(axes, _is_none)
