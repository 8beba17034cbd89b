"""Which devices a mapped axis lies on, in one process and in several."""

from collections import Counter

import jax
from jax.sharding import Mesh

from lockstep.compat.mapping.options import Options


def mine(options: Options) -> list[jax.Device]:
    """The devices of this process that a map with these options lies on, in order."""
    here = jax.process_index(options.backend)
    return [d for d in _everyone(options) if d.process_index == here]


def pick(options: Options, size: int, inner: int, alone: bool) -> list[jax.Device]:
    """The devices of the mesh, in the order of the mapped axis.

    Args:
        options: of the map.
        size: the size of the mapped axis in this process.
        inner: the product of the sizes of the maps inside it.
        alone: leave the other processes out.

    Raises:
        ValueError: there are not so many devices, or `axis_size` says otherwise.
    """
    local, need = mine(options), size * inner
    if need > len(local):
        raise ValueError(_too_few(options, size, inner, len(local)))
    if alone:
        return local[:need]
    picked, taken = [], Counter()
    for device in _everyone(options):
        if taken[device.process_index] < need:
            taken[device.process_index] += 1
            picked.append(device)
    whole = len(picked) // inner
    if options.axis_size not in (None, whole):
        raise ValueError(
            f"Specified axis_size {options.axis_size} doesn't match received "
            f"axis_size {whole}."
        )
    return picked


def check_all_used(options: Options, mesh: Mesh) -> None:
    """Raises if the map leaves devices idle that were named, or that others wait for.

    Asked after the function was traced, because maps inside it may use the others.
    """
    used, present = mesh.local_mesh.size, len(mine(options))
    if used == present:
        return
    size = mesh.local_mesh.devices.shape[0]
    if options.devices is not None:
        raise ValueError(_not_the_number(size, present))
    if used < mesh.size:
        raise ValueError(
            f"the mapped axis of a pmap over several processes has size {size} in this "
            f"one, which has {present} devices: map over jax.local_device_count(), or "
            "give devices="
        )


def _everyone(options: Options) -> list[jax.Device]:
    if options.devices is not None:
        return list(options.devices)
    backend = options.backend
    return [
        device
        for process in range(jax.process_count(backend))
        for device in jax.local_devices(process, backend)
    ]


def _too_few(options: Options, size: int, inner: int, present: int) -> str:
    if options.devices is not None and inner == 1:
        return _not_the_number(size, present)
    if options.devices is not None:
        return (
            f"pmapped function requires {size * inner} local devices to run due to "
            f"nested pmapped or other parallel functions, but only {present} are "
            "available."
        )
    return (
        f"compiling computation that requires {size * inner} logical devices, but only "
        f"{present} XLA devices are available (axis_size={size}, nested={inner}): "
        f"reshape the batch to ({present}, rows, ...), see lockstep.compat.shard"
    )


def _not_the_number(size: int, present: int) -> str:
    return (
        "Leading axis size of input to pmapped function must equal the number of local "
        f"devices passed to pmap. Got axis_size={size}, num_local_devices={present}."
    )
