"""The first collective of a mesh, made when all processes are there.

Backends connect the devices of a mesh at its first collective, and some wait for that
no longer than 30 s, whatever the other limits are. So the processes first wait for each
other on the host, as long as it takes, and then run a tiny collective at once.
"""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from lockstep.distributed.session import exchange, group_of


@functools.lru_cache(maxsize=64)
def meet(mesh: Mesh) -> None:
    """Connect the devices of a mesh, once; nothing to do within one process."""
    group = group_of(mesh)
    if len(group) == 1:
        return
    exchange(None, group, what="the first use of the mesh")
    _sum(mesh, mesh.axis_names)
    if len(mesh.axis_names) > 1:  # a step may reduce along one of them
        for axis in mesh.axis_names:
            _sum(mesh, (axis,))


def _sum(mesh: Mesh, names: tuple[str, ...]) -> None:
    def total() -> jax.Array:
        return jax.lax.psum(jax.numpy.ones((), jax.numpy.float32), names)

    count = jax.jit(
        jax.shard_map(
            total, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
        )
    )()
    count.block_until_ready()
