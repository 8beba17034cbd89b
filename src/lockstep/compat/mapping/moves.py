"""Inputs that were put on other devices than the map's: moved, counted, told once.

What comes from the host, and arrays that nobody put anywhere, are placed in silence.
Arrays committed to one device, or spread otherwise, JAX refuses today; the `pmap` of
old took them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from lockstep import notices

_sharding = operator.attrgetter("sharding")


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


def places(leaves: Sequence[Any]) -> list[Any]:
    """The sharding of every leaf; `None` for one that does not lie on a device."""
    try:  # without a loop in Python: a state may have hundreds of leaves
        return list(map(_sharding, leaves))
    except AttributeError:  # some come from the host
        return [getattr(leaf, "sharding", None) for leaf in leaves]


def is_elsewhere(leaf: Any, want: NamedSharding) -> bool:
    """Whether somebody put an array where it has to be moved from."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(want, leaf.ndim)
