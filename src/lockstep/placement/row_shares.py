"""How the rows of one global batch come from several processes.

Each process brings rows of its own. How many each brings is agreed before anything is
placed: JAX would take every process's word for the whole, and train on wrong averages.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep.distributed import agreement, session
from lockstep.distributed.lookout import MAIN


@dataclasses.dataclass(frozen=True)
class Ended:
    """Stands for the batch of a process that has no more, while others have.

    Attributes:
        like: its last batch, whose rows fill up what has no real rows.
    """

    like: Any


@dataclasses.dataclass(frozen=True)
class Shares:
    """What each process brings to one global batch.

    Attributes:
        processes: those that take part, by number.
        counts: the rows of each of them.
        shards: parts of the batch that this process holds.
        all_shards: parts of the whole batch.
        notes: what each process said beside its rows.
    """

    processes: tuple[int, ...]
    counts: tuple[int, ...]
    shards: int
    all_shards: int
    notes: tuple[Any, ...] = ()

    @property
    def own(self) -> int:
        """The rows of this process."""
        return self.counts[own_place(self.processes)]

    @property
    def total(self) -> int:
        """The rows of all processes, where each has rows of its own."""
        return sum(self.counts) * self.all_shards // self.shards // len(self.counts)

    @property
    def equal(self) -> bool:
        """Whether all processes bring as many."""
        return len(set(self.counts)) == 1

    def of_whole(self, rows: int) -> int:
        """This process's part of so many global rows."""
        return rows * self.shards // self.all_shards

    def whole(self, rows: int) -> int:
        """Global rows where each process has so many."""
        return rows * self.all_shards // self.shards

    def real_rows(self, rows: int, mesh: Mesh, axis_name: str) -> np.ndarray:
        """Where the real rows are in a global batch that was filled up.

        Args:
            rows: the rows of each process after filling up.
            mesh: the devices.
            axis_name: the mesh axis that splits rows.

        Returns:
            Indices: those of the first process, then those of the next.
        """
        per_shard, found, seen = rows // self.shards, [], set()
        for process, count in zip(self.processes, self.counts, strict=True):
            shards = shards_of(mesh, axis_name, process)
            if shards in seen:  # a model axis: other processes hold the same rows
                continue
            seen.add(shards)
            own = np.arange(count)
            held = np.asarray(shards or range(self.shards))
            found.append(held[own // per_shard] * per_shard + own % per_shard)
        return np.concatenate(found)

    def __str__(self) -> str:
        """`process 0 has 2 rows, process 1 has 4`, in full for up to 8 processes."""
        named = list(zip(self.processes, self.counts, strict=True))
        if len(named) > 8:
            by_count = dict(reversed([(count, p) for p, count in named]))
            named = sorted((p, count) for count, p in by_count.items())
        first, *others = (f"process {p} has {count}" for p, count in named)
        return ", ".join((f"{first} rows", *others))


def share_rows(
    rows: int,
    mesh: Mesh,
    axis_name: str,
    *,
    constants: Any = None,
    note: Any = None,
    channel: str = MAIN,
    cancelled: Callable[[], bool] | None = None,
) -> Shares | None:
    """Agree on the rows of each process of the mesh.

    Args:
        rows: those of this process.
        mesh: the devices.
        axis_name: the mesh axis that splits rows.
        constants: what must be the same on all processes, the leaves without rows;
            `None` knows of none.
        note: anything else to tell the others.
        channel: the sequence of exchanges that this one belongs to.
        cancelled: see `Line.exchange`.

    Returns:
        `None` when cancelled.

    Raises:
        RuntimeError: the constants differ, or the mesh treats processes unequally.
    """
    group = session.group_of(mesh)
    shards = shards_of(mesh, axis_name, jax.process_index()) if len(group) > 1 else None
    own = mesh.shape[axis_name] if shards is None else len(shards)
    found = session.exchange(
        [rows, constants, note],
        group,
        what="the rows of a batch",
        channel=channel,
        cancelled=cancelled,
    )
    if found is None:
        return None
    counts, constants, notes = zip(*found, strict=True)
    known = [(p, c) for p, c in zip(group, constants, strict=True) if c is not None]
    odd, usual = agreement.odd_one([c for _, c in known]) if known else (None, 0)
    if odd is not None:
        raise RuntimeError(
            "a batch holds values without rows, and they differ: process "
            f"{known[odd][0]} has {known[odd][1]}, process {known[usual][0]} has "
            f"{known[usual][1]}; such values are shared by all processes"
        )
    return Shares(group, tuple(counts), own, mesh.shape[axis_name], tuple(notes))


def own_place(processes: tuple[int, ...]) -> int:
    """Where this process stands among them."""
    return processes.index(jax.process_index()) if len(processes) > 1 else 0


@functools.lru_cache(maxsize=256)
def shards_of(mesh: Mesh, axis_name: str, process: int) -> tuple[int, ...]:
    """The parts of a batch that a process holds, by number.

    Raises:
        RuntimeError: processes hold unequal numbers of them.
    """
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0)
    owners = np.array([device.process_index for device in devices.flat])
    owners = owners.reshape(devices.shape[0], -1)
    held = {p: np.flatnonzero((owners == p).any(axis=1)) for p in np.unique(owners)}
    if process not in held:
        raise RuntimeError(
            f"process {process} has no device in the mesh {dict(mesh.shape)}: only the "
            f"processes {sorted(map(int, held))} can run steps on it"
        )
    sizes = {len(shards) for shards in held.values()}
    if len(sizes) > 1:
        raise RuntimeError(
            f"the processes hold unequal parts of the axis {axis_name!r} (between "
            f"{min(sizes)} and {max(sizes)}): order the mesh's devices by process"
        )
    return tuple(map(int, held[process]))
