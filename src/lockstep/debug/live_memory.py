"""`memory_now`: what the devices hold at this moment."""

import dataclasses
import html
from collections import defaultdict
from typing import Any

import jax

from lockstep.memory import in_units
from lockstep.tree import describe_leaf

_UNEVEN = 1.2


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """One array that is alive.

    Attributes:
        text: its type, as `float32[8,3]`.
        nbytes: bytes on each of its devices.
        devices: the numbers of its devices in this process.
    """

    text: str
    nbytes: int
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """Bytes on each device of this process, and the largest arrays.

    Attributes:
        by_device: number of a device -> bytes of live arrays.
        in_use: number of a device -> bytes that its allocator has given out, with
            programs and temporaries; empty where the backend does not tell (CPU).
        limits: number of a device -> bytes that its allocator may use, likewise.
        largest: the largest arrays, by their bytes on all devices.
        warnings: what is wrong; empty when all devices hold about as much.
    """

    by_device: dict[int, int]
    in_use: dict[int, int]
    limits: dict[int, int]
    largest: tuple[LiveArray, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes on the fullest device over those on the emptiest."""
        most, least = max(self.by_device.values()), min(self.by_device.values())
        return most / least if least else (float("inf") if most else 1.0)

    def __str__(self) -> str:
        """The devices, the largest arrays, and the warnings."""
        lines = []
        for device, nbytes in self.by_device.items():
            line = f"device {device}: {in_units(nbytes)} in arrays"
            if device in self.in_use:
                line += f", {in_units(self.in_use[device])} in use"
            if device in self.limits:
                line += f" of {in_units(self.limits[device])}"
            lines.append(line)
        lines.append(f"fullest over emptiest device: {self.ratio:.2f}")
        lines += [
            f"  {x.text}, {in_units(x.nbytes)} on {_devices(x.devices)}"
            for x in self.largest
        ]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def memory_now(*, arrays: int = 10, min_bytes: int = 1 << 20) -> LiveMemory:
    """Count what every device of this process holds, and name the largest arrays.

    Args:
        arrays: how many arrays to list.
        min_bytes: devices that differ by less are taken to be equally full.

    Example:
        >>> x = ls.replicate(np.ones(1000, np.float32), ls.make_mesh())
        >>> min(memory_now().by_device.values()) >= 4000
        True
    """
    held: dict[int, int] = {d.id: 0 for d in jax.local_devices()}
    found: dict[Any, LiveArray] = {}
    # Largest first: an array that is a shard of another shares its memory.
    alive = [x for x in jax.live_arrays() if not x.is_deleted()]
    counted: set[Any] = set()
    for array in sorted(alive, key=lambda x: -len(x.devices())):
        new: dict[int, int] = defaultdict(int)
        for shard in array.addressable_shards:
            key = _buffer(shard)
            if key not in counted:
                counted.add(key)
                new[shard.device.id] += shard.data.nbytes
        for device, nbytes in new.items():
            held[device] = held.get(device, 0) + nbytes
        if new:
            nbytes = max(new.values())
            text = describe_leaf(array)
            found[id(array)] = LiveArray(text, nbytes, tuple(sorted(new)))
    biggest = sorted(found.values(), key=lambda x: -x.nbytes * len(x.devices))
    stats = {d.id: d.memory_stats() or {} for d in jax.local_devices()}
    warnings = _warnings(held, biggest, min_bytes)
    return LiveMemory(
        by_device=dict(sorted(held.items())),
        in_use=_stat(stats, "bytes_in_use"),
        limits=_stat(stats, "bytes_limit"),
        largest=tuple(biggest[:arrays]),
        warnings=tuple(warnings),
    )


def _buffer(shard: Any) -> Any:
    """What tells two views of the same memory apart from two arrays."""
    try:
        return shard.device.id, shard.data.unsafe_buffer_pointer()
    except (AttributeError, NotImplementedError, RuntimeError):
        return shard.device.id, id(shard.data)


def _stat(stats: dict[int, dict[str, int]], name: str) -> dict[int, int]:
    return {device: found[name] for device, found in stats.items() if name in found}


def _warnings(
    held: dict[int, int], arrays: list[LiveArray], min_bytes: int
) -> list[str]:
    full, empty = (pick(held, key=lambda d: held[d]) for pick in (max, min))
    if held[full] - held[empty] < min_bytes or held[full] <= _UNEVEN * held[empty]:
        return []
    alone = [
        f"{x.text} ({in_units(x.nbytes)})"
        for x in arrays
        if full in x.devices and empty not in x.devices
    ]
    factor = held[full] / held[empty] if held[empty] else float("inf")
    return [
        f"device {full} holds {in_units(held[full])} and device {empty} "
        f"{in_units(held[empty])}, {factor:.1f} times less; only on the first: "
        f"{', '.join(alone[:3])}. Batches or a state were put on one device before "
        "they were split: give the step NumPy arrays (no jnp.asarray before it), place "
        "the state with lockstep.replicate, and let go of the first copy"
    ]


def _devices(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"devices {numbers[0]} to {numbers[-1]}"
    return f"devices {', '.join(map(str, numbers))}"
