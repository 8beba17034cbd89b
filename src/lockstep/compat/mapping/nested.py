"""A `pmap` inside a `pmap`: one mesh of two axes (or more).

The outer map is a `shard_map` over the first axis of the mesh. The inner one is a
`vmap` whose axis XLA splits over the second, which is an `Auto` axis: closures over
values of the outer map, gradients and collectives over both names then work as the
rules of `vmap` say (a `lax.cond` on what differs runs both branches). Collectives with
`axis_index_groups` have no such rule; for them the inner map is a `shard_map` as well.

Nobody knows the inner axes before the function has run. So the outer map is traced
with the axes known so far; an inner map that finds none left for it raises
`DeeperMesh`, which unwinds to the outer one, and that traces again on a wider mesh.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from lockstep import notices
from lockstep.compat.mapping.leaves import MappedLeaves
from lockstep.compat.mapping.options import Options, input_axes, spread
from lockstep.compat.mapping.shards import on_rows, specs

Axes = tuple[tuple[str, int], ...]
"""The names and sizes of the axes of a mesh, the outermost first."""

_here = threading.local()  # .axes: the mesh being traced for; .depth: how deep we are


class DeeperMesh(BaseException):
    """An inner map needs one more axis; not an `Exception`, so that nobody eats it."""

    def __init__(self, axes: Axes):
        super().__init__(axes)
        self.axes = axes


@contextmanager
def tracing(axes: Axes, depth: int = 1) -> Iterator[None]:
    """While the body of a map at `depth` is traced for a mesh of these axes."""
    before = getattr(_here, "axes", None), getattr(_here, "depth", 0)
    _here.axes, _here.depth = axes, depth
    try:
        yield
    finally:
        _here.axes, _here.depth = before


def inside_a_map() -> bool:
    """Whether a `shard_map`, ours or another, is being traced around this call."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def call_inner(
    fun: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Maps `fun` over the next axis of the mesh that the outer map is traced for."""
    mapped, static = options.split(args)
    leaves, tree = jax.tree.flatten((mapped, kwargs))
    axes = input_axes(options, mapped, kwargs)
    size = MappedLeaves(lambda: fun, options, tree, axes).size(leaves)
    mesh_axis = _next_axis(options, size)
    mesh_axes, depth = _here.axes, _here.depth + 1

    def body(*rows: Any) -> Any:
        mapped, kwargs = jax.tree.unflatten(tree, rows)
        with tracing(mesh_axes, depth):
            return fun(*options.join(mapped, static), **kwargs)

    try:
        return _as_vmap(body, options, leaves, axes, mesh_axis)
    except NotImplementedError as no_rule:
        if mesh_axis is None:
            raise
        try:
            return _as_shard_map(body, options, leaves, axes, mesh_axis)
        except Exception as error:
            raise no_rule from error


def _next_axis(options: Options, size: int) -> str | None:
    """The mesh axis to map over; `None` where it has another size."""
    if options.devices is not None:
        raise ValueError(
            "Nested pmap with explicit devices argument. Give devices= to the "
            "outermost pmap alone: it lays out the mesh for both."
        )
    if getattr(_here, "axes", None) is None:
        raise ValueError(
            "pmap inside a shard_map that is not lockstep.compat.pmap's: map once, "
            "over a mesh with both axes, or make the outer map a lockstep.compat.pmap"
        )
    if _here.depth == len(_here.axes):
        taken = [name for name, _ in _here.axes]
        name = options.axis_name
        name = f"{name}_{_here.depth}" if name in taken else name
        raise DeeperMesh((*_here.axes, (name, size)))
    name, wide = _here.axes[_here.depth]
    if wide == size:
        return name
    notices.say_once(
        f"compat.pmap: nested {wide} and {size}",
        f"an inner pmap over {size} rows runs unsplit on each device of the outer one, "
        f"whose mesh was laid out for an inner pmap over {wide}: the numbers are the "
        "same, but it is slower; give both the same size",
    )
    return None


def _as_vmap(
    body: Callable[..., Any],
    options: Options,
    leaves: list[Any],
    axes: tuple[int | None, ...],
    mesh_axis: str | None,
) -> Any:
    mapped = jax.vmap(
        body,
        in_axes=axes,
        out_axes=options.out_axes,
        axis_name=options.axis_name,
        spmd_axis_name=mesh_axis,
    )
    if mesh_axis is None:
        return mapped(*leaves)
    out = mapped(*_split(leaves, axes, mesh_axis))
    leaves, tree = jax.tree.flatten(out)
    axes = spread(options.out_axes, out, "pmap out_axes")
    return jax.tree.unflatten(tree, _split(leaves, axes, mesh_axis))


def _split(
    leaves: list[Any], axes: tuple[int | None, ...], mesh_axis: str
) -> list[Any]:
    """The leaves with a hint to XLA: each is split on its axis over the mesh axis."""

    def hint(leaf: Any, axis: int) -> Any:
        # Maps inside this one may split the other axes.
        parts: list[Any] = [P.UNCONSTRAINED] * jax.numpy.ndim(leaf)
        parts[axis] = mesh_axis
        return lax.with_sharding_constraint(leaf, P(*parts))

    pairs = zip(leaves, axes, strict=True)
    return [leaf if axis is None else hint(leaf, axis) for leaf, axis in pairs]


def _as_shard_map(
    body: Callable[..., Any],
    options: Options,
    leaves: list[Any],
    axes: tuple[int | None, ...],
    mesh_axis: str,
) -> Any:
    """For what `vmap` cannot do: the groups of a collective have no rule there."""
    return jax.shard_map(
        on_rows(body, axes, options.out_axes),
        in_specs=specs(axes, mesh_axis),
        out_specs=specs(options.out_axes, mesh_axis),
        axis_names={mesh_axis},
        check_vma=False,
    )(*leaves)
