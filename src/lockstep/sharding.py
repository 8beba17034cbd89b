"""Where arrays lie: the few `NamedSharding`s that data parallelism needs.

Each is made once a mesh: arrays placed alike share one sharding object, which makes
"is it placed?" a comparison by identity.
"""

import functools
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
    """One full copy on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def rows(mesh: Mesh, axis_name: str = "data") -> NamedSharding:
    """Axis 0 (the rows of a batch) split along one mesh axis.

    Raises:
        ValueError: the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    return NamedSharding(mesh, PartitionSpec(axis_name))


@functools.cache
def split(mesh: Mesh, axis_name: str, shape: tuple[int, ...]) -> NamedSharding:
    """The first dimension that divides split along one mesh axis; else replicated.

    Example:
        >>> from lockstep.devices import make_mesh
        >>> mesh = make_mesh()
        >>> [tuple(split(mesh, "data", shape).spec) for shape in ((3, 16), (3,))]
        [(None, 'data'), ()]
    """
    check_axis(mesh, axis_name)
    parts = mesh.shape[axis_name]
    for i, length in enumerate(shape):
        if length and length % parts == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * i, axis_name))
    return replicated(mesh)


def row_axis(mesh: Mesh, axis_name: str | None = None) -> str:
    """The mesh axis that splits rows: the named one, "data", or the only one.

    Raises:
        ValueError: the mesh has no axis of that name, or several and none is "data".
    """
    if axis_name is None and len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    check_axis(mesh, axis_name or "data")
    return axis_name or "data"


def check_axis(mesh: Mesh, axis_name: str) -> None:
    """Raise a `ValueError` that lists the axes when `axis_name` is none of them."""
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh has no axis {axis_name!r}; its axes are "
            f"{dict(mesh.shape)}: name one of them, or make a mesh with "
            f"make_mesh({{{axis_name!r}: {mesh.size}}})"
        )


def on_mesh(array: jax.Array, mesh: Mesh) -> bool:
    """Whether an array already lies on this mesh (same devices, Auto axes)."""
    sharding = array.sharding
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def auto(mesh: Mesh) -> Mesh:
    """The mesh with `Auto` axes, on which the compiler lays out what is in between.

    Example:
        >>> auto(jax.make_mesh((1,), ("data",))).axis_types
        (Auto,)
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return (
        mesh
        if mesh.axis_types == types
        else Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    )


def regard(array: Any, mesh: Mesh) -> Any:
    """An array, or the description of one, as lying on a mesh of the same devices.

    Nothing is copied; only the types of the mesh's axes may differ.
    """
    if not isinstance(getattr(array, "sharding", None), NamedSharding):
        return array
    if array.sharding.mesh == mesh:
        return array
    where = NamedSharding(mesh, array.sharding.spec)
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=where)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, where, shards)
