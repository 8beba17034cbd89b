"""`lockstep doctor`: the device report, and an all-reduce, checked and timed."""

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from lockstep.devices import describe_devices, make_mesh


@dataclass(frozen=True)
class AllReduce:
    """The time of one all-reduce, in which each device gives and gets `bytes`."""

    devices: int
    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """`bytes` over `seconds`, in 1e9 bytes a second."""
        return self.bytes / self.seconds / 1e9

    def __str__(self) -> str:
        return (
            f"{self.bytes / 2**20:g} MiB a device over {self.devices} devices: "
            f"{self.seconds * 1e3:.2f} ms, {self.gb_per_s:.2f} GB/s"
        )


def examine(size_mib: int) -> bool:
    """Prints the report and the all-reduce; returns whether all hardware is in use.

    Raises:
        RuntimeError: the all-reduce gave a wrong sum.
    """
    console = Console()
    report = describe_devices()
    console.print(report)
    if report.total_devices > 1:
        timing = time_all_reduce(make_mesh(), size_mib * 2**20)
        console.print(f"[bold]all-reduce[/]  {timing}", soft_wrap=True)
    return report.total_devices > 0 and not report.idle_hardware


def time_all_reduce(mesh: Mesh, size: int, *, repeats: int = 5) -> AllReduce:
    """Sums `size` bytes of float32 over a mesh with the one axis `data`.

    Returns:
        The median of `repeats` runs after one that compiles and is checked.

    Raises:
        RuntimeError: a device got a wrong sum.
    """
    count = mesh.size
    split = NamedSharding(mesh, P("data"))
    numbers = jnp.arange(1, count + 1, dtype=jnp.float32)[:, None]
    values = jax.jit(
        lambda: jnp.broadcast_to(numbers, (count, max(1, size // 4))),
        out_shardings=split,
    )()
    reduce = jax.jit(
        jax.shard_map(
            lambda shard: lax.psum(shard, "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )
    check_sum(reduce(values), count * (count + 1) / 2)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(reduce(values))
        seconds.append(time.perf_counter() - start)
    return AllReduce(count, values.nbytes // count, statistics.median(seconds))


def check_sum(total: jax.Array, want: float) -> None:
    """Compares every local device's copy with the right sum.

    Raises:
        RuntimeError: one differs; names the device and both numbers.
    """
    for shard in total.addressable_shards:
        copy = np.asarray(shard.data)
        wrong = copy[copy != want]
        if wrong.size:
            raise RuntimeError(
                f"the all-reduce gave {wrong[0]:g} on {shard.device}, not {want:g}: "
                "this machine's devices, or the links between them, give wrong results"
            )
