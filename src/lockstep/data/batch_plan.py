"""What a batch size means: global rows, over processes, devices and rows a device."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import sharding


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How the rows of one global batch lie; `str(plan)` is one line to print.

    Example:
        >>> print(BatchPlan(global_rows=256, processes=1, shards=4))
        global 256 = 1 process x 4 devices x 64 rows

    Attributes:
        global_rows: rows of one batch over all processes and devices.
        processes: how many parts the batch is read in.
        shards: devices of one process on the data axis, with their own rows each.
        first_shard: the first of this process's shards, counted over all processes.
        devices_per_shard: devices that hold the same rows (a model axis).
    """

    global_rows: int
    processes: int
    shards: int
    first_shard: int = 0
    devices_per_shard: int = 1

    def __str__(self) -> str:
        where = f"{_count(self.processes, 'process')} x "
        if self.devices_per_shard == 1:
            where += _count(self.shards, "device")
        else:
            width = _count(self.devices_per_shard, "device")
            where += f"{_count(self.shards, 'shard')} of {width}"
        rows, over = divmod(self.global_rows, self.processes * self.shards)
        if over:
            return f"global {self.global_rows}: fewer rows than {where}"
        return f"global {self.global_rows} = {where} x {_count(rows, 'row')}"

    def local(self, rows: int) -> slice:
        """This process's part of a global batch of `rows`, in the order of devices.

        Raises:
            ValueError: some process would have no row.
        """
        if rows < self.processes:
            raise ValueError(
                f"a batch of {_count(rows, 'row')} leaves some of {self.processes} "
                "processes without a row: use remainder='drop', or another batch size"
            )
        total = self.processes * self.shards
        last_shard = self.first_shard + self.shards
        return slice(rows * self.first_shard // total, rows * last_shard // total)


def plan_batches(
    global_batch_size: int | None,
    per_device_batch_size: int | None,
    mesh: Mesh | None = None,
) -> BatchPlan:
    """The plan for exactly one of the two sizes, over the data axis of a mesh.

    Raises:
        ValueError: none or both sizes, a size below 1, rows that do not divide over
            the devices, or processes that the mesh treats unequally.

    Example:
        >>> print(plan_batches(None, 8))
        global 64 = 1 process x 8 devices x 8 rows
    """
    given = [s for s in (global_batch_size, per_device_batch_size) if s is not None]
    if len(given) != 1:
        raise ValueError(
            "batches needs exactly one of global_batch_size= (rows over all processes "
            "and devices) and per_device_batch_size= (rows on each device); got "
            f"global_batch_size={global_batch_size} and "
            f"per_device_batch_size={per_device_batch_size}"
        )
    if given[0] < 1:
        raise ValueError(f"a batch size of {given[0]} rows: it must be at least 1")
    processes, shards, first, width = _shards_of_this_process(mesh)
    total = processes * shards
    rows = global_batch_size or given[0] * total
    if rows > total and rows % total:
        below = rows // total
        raise ValueError(
            f"global_batch_size={rows} does not divide over {total} devices: use "
            f"global_batch_size={below * total} or {below * total + total}, which is "
            f"per_device_batch_size={below} or {below + 1}"
        )
    return BatchPlan(rows, processes, shards, first, width)


def _shards_of_this_process(mesh: Mesh | None) -> tuple[int, int, int, int]:
    """(parts the batch is read in, my shards, my first shard, devices a shard)."""
    owners = _owners(mesh)
    me = jax.process_index()
    held = {p: np.flatnonzero((owners == p).any(axis=1)) for p in np.unique(owners)}
    if me not in held:
        raise ValueError(f"process {me} has no device in this mesh: it has no rows")
    mine = held[me]
    for process, shards in held.items():
        if len(shards) != len(mine) or np.any(np.diff(shards) != 1):
            raise ValueError(
                f"process {me} holds shards {mine.tolist()} of the batch and process "
                f"{process} holds {shards.tolist()}: every process needs as many, one "
                "after the other; order the mesh's devices by process"
            )
    parts = owners.shape[0] // len(mine)
    return parts, len(mine), int(mine[0]), owners.shape[1]


def _owners(mesh: Mesh | None) -> np.ndarray:
    """The process of each device, `[shards, devices a shard]`."""
    if mesh is None:
        return np.array([[device.process_index] for device in jax.devices()])
    axes = mesh.axis_names
    axis_name = axes[0] if len(axes) == 1 else "data"
    sharding.check_axis(mesh, axis_name)
    devices = np.moveaxis(mesh.devices, axes.index(axis_name), 0)
    owners = np.array([device.process_index for device in devices.flat])
    return owners.reshape(devices.shape[0], -1)


def _count(n: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{'' if n == 1 else plural}"
