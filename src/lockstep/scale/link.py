"""The link between the devices of this run, from the times of its all-reduces."""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.devices import make_mesh
from lockstep.scale.network import ALGORITHMS, Link, Network

SIZES = tuple(4**k * 1024 for k in range(1, 8))  # 4 KiB to 16 MiB
_IN_A_ROW = 8  # in one program, as in a step: the call itself is not the link's


def measure(*, turns: int = 7) -> Network:
    """All devices of this run as a ring of equal links, whatever lies between them.

    Every process calls it. Takes some seconds.

    Raises:
        ValueError: there is only one device.
    """
    mesh = make_mesh()
    if mesh.size == 1:
        raise ValueError(
            "one device has no link to measure: run it in several processes, "
            "lockstep run --processes 2 -m lockstep scale ..."
        )
    link = fit(SIZES, [all_reduce_s(mesh, n, turns) for n in SIZES], mesh.size)
    source = (
        f"{link.latency_s * 1e6:.0f} us and {link.bandwidth / 1e9:.3g} GB/s, by "
        f"all-reduces over {mesh.size} devices (processes: {jax.process_count()})"
    )
    only_ring = jax.default_backend() == "cpu"  # gloo knows no tree
    return Network(1, link, link, source, ("ring",) if only_ring else ALGORITHMS)


def all_reduce_s(mesh: Mesh, nbytes: int, turns: int = 7) -> float:
    """Seconds of one all-reduce of `nbytes` on each device; the median of the turns."""

    def reduce(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _IN_A_ROW, lambda _, x: lax.psum(x, "data"), x)

    split = NamedSharding(mesh, P("data"))
    zeros = jax.jit(lambda: jnp.zeros(nbytes // 4 * mesh.size), out_shardings=split)()
    spec = P("data")
    run = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    jax.block_until_ready(run(zeros))
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(run(zeros))
        times.append((time.perf_counter() - start) / _IN_A_ROW)
    return statistics.median(times)


def fit(nbytes: Sequence[float], seconds: Sequence[float], devices: int) -> Link:
    """The link whose ring comes closest to all times, each by its ratio.

    A ring of p takes 2 (p - 1) (a + n / (p b)) for n bytes: a line over n.

    Example:
        >>> link = fit([1e3, 1e6], [4e-6, 1.003e-3], devices=2)
        >>> round(link.latency_s * 1e6, 2), round(link.bandwidth / 1e9, 2)
        (1.5, 1.0)
    """
    n, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    terms = np.stack([np.ones_like(n), n], axis=1) / t[:, None]
    (fixed, each_byte), *_ = np.linalg.lstsq(terms, np.ones_like(t))
    hops = 2 * (devices - 1)
    return Link(
        latency_s=max(float(fixed), 0.0) / hops,
        bandwidth=hops / devices / max(float(each_byte), 1e-15),
    )
