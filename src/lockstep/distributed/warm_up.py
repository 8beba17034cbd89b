"""The first collective of a mesh, made when all processes are there.

Backends connect the devices of a mesh at its first collective, and some wait for that
no longer than 30 s, whatever the other limits are. So the processes first wait for each
other on the host, as long as it takes, and then run a tiny collective at once.
"""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lockstep.distributed.session import exchange, group_of


@functools.lru_cache(maxsize=64)
def meet(mesh: Mesh) -> None:
    """Connect the devices of a mesh, once; nothing to do within one process."""
    group = group_of(mesh)
    if len(group) == 1:
        return
    exchange(None, group, what="the first use of the mesh")
    axes = mesh.axis_names
    for names in {axes, *((axis,) for axis in axes)}:  # each set of devices it uses
        _sum(mesh, names)


def _sum(mesh: Mesh, names: tuple[str, ...]) -> None:
    def total() -> jax.Array:
        return jax.lax.psum(jax.numpy.ones(()), names)

    count = jax.jit(
        jax.shard_map(
            total, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
        )
    )()
    expected = np.prod([mesh.shape[name] for name in names])
    if float(count) != expected:
        raise RuntimeError(f"{expected} devices were connected and {count} answered")
