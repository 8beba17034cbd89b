"""Inputs that lie on other devices than the map: moved, counted, told once.

JAX itself places NumPy arrays and uncommitted arrays (those that nobody put on a
device). It refuses arrays committed to one device or spread otherwise, which the
`pmap` of old took.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from lockstep import notices


@dataclass
class Moves:
    """What a mapped function had to move, over all its calls.

    Attributes:
        calls: calls in which something was moved.
        leaves: leaves moved.
        nbytes: bytes of these leaves, each counted once whatever its replication.
    """

    calls: int = 0
    leaves: int = 0
    nbytes: int = 0

    def count(self, name: str, moved: dict[str, jax.Array]) -> None:
        """Counts the moved leaves of one call, and tells of the first such call."""
        self.calls += 1
        self.leaves += len(moved)
        self.nbytes += sum(leaf.nbytes for leaf in moved.values())
        path, leaf = next(iter(moved.items()))
        devices = sorted(d.id for d in leaf.sharding.device_set)
        notices.say_once(
            f"compat.pmap moved inputs of {name}",
            f"pmap({name}) moved {len(moved)} inputs to its devices, {path} from "
            f"devices {devices} first: the numbers are the same, but every call "
            "with such inputs moves them again; place them once with "
            "lockstep.compat.replicate() or device_put_sharded()",
        )


def misplaced(leaves: Sequence[Any], wants: Sequence[NamedSharding]) -> list[int]:
    """Positions of the leaves that JAX would refuse to take from where they are."""
    # The state of a loop comes back in the very sharding that is wanted.
    odd = [
        position
        for position, (leaf, want) in enumerate(zip(leaves, wants, strict=True))
        if getattr(leaf, "sharding", want) is not want
    ]
    return [p for p in odd if not _is_taken(leaves[p], wants[p])]


def on_the_host(leaves: Sequence[Any]) -> list[int]:
    """Positions of the leaves that are no arrays of JAX yet."""
    return [p for p, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]


def _is_taken(leaf: jax.Array, want: NamedSharding) -> bool:
    if not leaf.committed:
        return True
    mesh = getattr(leaf.sharding, "mesh", None)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return False  # the names of its axes are part of its type
    if want.mesh.size > want.mesh.devices.shape[0]:  # nested: XLA chooses how
        return leaf.sharding.device_set == want.device_set
    return leaf.sharding.is_equivalent_to(want, leaf.ndim)
