"""Are the replicas equal? Digests made on the devices, one row a device.

An array may claim to be replicated while its copies differ (a step that forgot its
all-reduce makes such arrays), so the copies themselves are compared. Each device
hashes its own copy; 8 bytes per leaf and device travel to the host.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.distributed.session import exchange, group_of
from lockstep.tree import check_leaf_alive, is_key, named_leaves


class ReplicaMismatch(ValueError):
    """Copies of one leaf differ between devices."""


def check_replicas(
    state: Any,
    *,
    tolerance: float = 0.0,
    name: str = "state",
    stacked: bool = False,
) -> None:
    """Raise if any copy of any leaf differs from the others.

    Bits are compared (NaN equals NaN); integers, `bool` and typed keys included.
    Leaves that live on one device pass: they have no second copy.

    Args:
        state: a tree of arrays on a mesh.
        tolerance: largest absolute difference that counts as equal.
        name: how the messages call the tree.
        stacked: the copies are the rows of each leaf, one a device, as `compat.pmap`
            and `compat.replicate` return them.

    Raises:
        ReplicaMismatch: names the leaf, the devices, the first index, and by how much.

    Example:
        >>> from lockstep import make_mesh, replicate
        >>> check_replicas(replicate({"w": np.ones(3)}, make_mesh()))
    """
    if stacked:
        state = jax.tree.map(unstacked, state)
    problem = first_mismatch(state, tolerance=tolerance, name=name)
    if problem:
        raise ReplicaMismatch(
            f"{problem}. The devices no longer train one model: average the "
            "gradients over the axis (lax.pmean), draw no per-device numbers into the "
            "state, and start all devices from replicate(state)"
        )


def first_mismatch(
    state: Any, *, tolerance: float = 0.0, name: str = "state"
) -> str | None:
    """What differs first, in words, or `None` when all copies agree."""
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for path, leaf in named_leaves(state, name):
        check_leaf_alive(leaf, path)
        where = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.Array) and isinstance(where, NamedSharding):
            groups.setdefault(where.mesh, []).append((path, leaf))
    for mesh, leaves in groups.items():
        exchange(None, group_of(mesh), what="a comparison of replicas")
        specs = tuple(leaf.sharding.spec for _, leaf in leaves)
        digests = np.asarray(_digests(mesh, specs)([leaf for _, leaf in leaves]))
        for (path, leaf), digest in zip(leaves, digests.swapaxes(0, 1), strict=True):
            if problem := _compare(path, leaf, mesh, digest, tolerance):
                return problem
    return None


def unstacked(leaf: Any) -> Any:
    """The rows of a stacked leaf as the copies of one; nothing leaves its device."""
    where = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(where, NamedSharding):
        return leaf
    shards = leaf.addressable_shards
    if not leaf.shape or len(shards) != leaf.shape[0] or where.is_fully_replicated:
        return leaf
    return jax.make_array_from_single_device_arrays(
        leaf.shape[1:],
        NamedSharding(where.mesh, PartitionSpec()),
        [shard.data[0] for shard in shards],
    )


@functools.lru_cache(maxsize=64)
def _digests(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """A compiled function: leaves -> uint32 `[devices, leaves, 2]`."""
    axes, alone = mesh.axis_names, mesh.size == mesh.local_mesh.size

    def local(leaves: list[jax.Array]) -> jax.Array:
        own = jnp.stack([_digest(x) for x in leaves])
        return own[None] if alone else jax.lax.all_gather(own, axes)

    # A process can read the rows of its own devices; of several each gets all rows.
    rows = PartitionSpec(axes) if alone else PartitionSpec()
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(list(specs),), out_specs=rows, check_vma=False
        )
    )


def _digest(x: jax.Array) -> jax.Array:
    """Two 32-bit hashes of an array's bits.

    The first multiplies each word by an odd number, so that a single flipped bit
    always shows; the second mixes words and positions, so that two changes that
    cancel in the first do not cancel here.
    """
    words = _words(x)
    position = jax.lax.iota(jnp.uint32, words.size)
    linear = jnp.sum(words * (position * 2 + 1), dtype=jnp.uint32)
    mixed = jnp.sum(_mix(words ^ _mix(position)), dtype=jnp.uint32)
    return jnp.stack([linear, mixed])


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as a flat uint32 vector; every NaN has the same bits."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, x.dtype), x)
    width = x.dtype.itemsize * 8
    if x.dtype == jnp.bool_ or "int" in x.dtype.name and width < 32:
        return x.astype(jnp.uint32).ravel()
    target = jnp.uint32 if width >= 32 else jnp.dtype(f"uint{width}")
    return jax.lax.bitcast_convert_type(x, target).astype(jnp.uint32).ravel()


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (public domain, Appleby 2008)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _compare(
    path: str, leaf: jax.Array, mesh: Mesh, digest: np.ndarray, tolerance: float
) -> str | None:
    """Compare the devices that should hold the same part of one leaf."""
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    first: dict[str, int] = {}
    odd: dict[int, list[int]] = {}
    for row, device in enumerate(mesh.devices.flat):
        reference = first.setdefault(str(indices[device]), row)
        if (digest[row] != digest[reference]).any():
            odd.setdefault(reference, []).append(row)
    for reference, rows in odd.items():
        devices = [mesh.devices.flat[r].id for r in (reference, *rows)]
        if text := _describe(path, leaf, devices, tolerance):
            return text
    return None


def _describe(
    path: str, leaf: jax.Array, devices: list[int], tolerance: float
) -> str | None:
    """The difference in words; reads the first copy and the odd ones in full."""
    names = ", ".join(map(str, devices[1:]))
    head = f"{path}: device{'s' * (len(devices) > 2)} {names} differ from {devices[0]}"
    shards = {s.device.id: s.data for s in leaf.addressable_shards}
    if any(d not in shards for d in devices):
        return f"{head} (some in other processes)"
    copies = [_as_numpy(shards[d]) for d in devices]
    wide = np.complex128 if np.iscomplexobj(copies[0]) else np.float64
    with np.errstate(invalid="ignore"):
        gaps = [np.abs(c.astype(wide) - copies[0].astype(wide)) for c in copies[1:]]
    largest = max(float(np.max(np.nan_to_num(g, nan=np.inf))) for g in gaps)
    if largest <= tolerance and tolerance > 0:
        return None
    bad = _bits_differ(copies[1], copies[0])
    where = np.unravel_index(int(np.argmax(bad)), bad.shape)
    index = f"[{', '.join(str(int(i)) for i in where)}]" if bad.shape else "0"
    return f"{head}, first at index {index}, max abs difference {largest:.6g}"


def _as_numpy(shard: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(shard) if is_key(shard) else shard)


def _bits_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays hold other bits; NaN equals NaN, 0.0 differs from -0.0."""
    if np.iscomplexobj(a):
        parts = ((np.real(a), np.real(b)), (np.imag(a), np.imag(b)))
        return np.logical_or(*(_bits_differ(x, y) for x, y in parts))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    both_nan = (a != a) & (b != b)
    differ = np.ascontiguousarray(a).view(unsigned) != np.ascontiguousarray(b).view(
        unsigned
    )
    return differ.reshape(a.shape) & ~both_nan
