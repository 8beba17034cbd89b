"""The loops of the pmap era, as the guides teach them, for the benchmark table."""

import jax
from flax import jax_utils

from lockstep.bench import handwritten
from lockstep.bench.contender import Contender


def guides(work, mesh):
    """Reshape on the host, `pmap`, `device_get` of the metrics in every step."""
    mapped, devices = _mapped(work, mesh)
    held = [jax_utils.replicate(handwritten.start(work), devices)]

    def run(steps):
        for _ in range(steps):
            held[0], metrics = mapped(held[0], _split(work.batch, mesh))
            jax.device_get(metrics)

    return Contender("the guides' pmap loop", run)


def flax(work, mesh):
    """`replicate` and `prefetch_to_device` of flax, and `pmap`."""
    mapped, devices = _mapped(work, mesh)
    held = [jax_utils.replicate(handwritten.start(work), devices)]

    def run(steps):
        hosts = (_split(work.batch, mesh) for _ in range(steps))
        batches = jax_utils.prefetch_to_device(hosts, 2, devices)

        def call():
            held[0], metrics = mapped(held[0], next(batches))
            return metrics

        handwritten.bounded(call, steps)

    return Contender("flax prefetch + pmap", run)


def _mapped(work, mesh):
    devices = list(mesh.devices.flat)
    step = handwritten.one_shard(work)
    return jax.pmap(step, "data", devices=devices, donate_argnums=0), devices


def _split(batch, mesh):
    return jax.tree.map(lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), batch)
