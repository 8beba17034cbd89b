"""What the bits of a run depend on, to keep in a checkpoint and compare at resume."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

from lockstep.devices.machine import count_cores, installed_versions

# How many devices a CPU stands in for changes no bit.
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def conditions(step: Any, global_batch: int | None = None) -> dict[str, Any]:
    """What the bits of a training run depend on, beside its code, data and seed.

    With `fixed_shards` two runs give the same bits where these are equal: the number of
    devices is not among them.

    Args:
        step: a `TrainStep`.
        global_batch: rows of all devices together.

    Returns:
        Names to numbers and texts, ready for JSON.

    Example:
        >>> import optax
        >>> from lockstep.step import make_train_step
        >>> step = make_train_step(lambda w, x: w * x, optax.sgd(0.1), axis_name="data",
        ...                        fixed_shards=8)
        >>> here = conditions(step, 256)
        >>> here["fixed_shards"], here["global_batch"], here["device"]
        (8, 256, 'cpu cpu')
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    device = jax.local_devices()[0]
    return {
        "fixed_shards": step.fixed_shards,
        "accumulate": step.accumulate,
        "global_batch": global_batch,
        "device": f"{device.platform} {device.device_kind}",
        "processor": _processor(),
        # A matrix product on a CPU may be added up in as many parts as there are cores.
        "cores": count_cores() if device.platform == "cpu" else None,
        "versions": installed_versions(),
        "xla_flags": " ".join(
            sorted(flag for flag in flags if not flag.startswith(_DEVICE_COUNT))
        ),
        "x64": bool(jax.config.jax_enable_x64),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "random_numbers": jax.config.jax_default_prng_impl,
    }


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which conditions differ, each as `name: before -> now`.

    Example:
        >>> changed({"fixed_shards": 8, "cores": 2}, {"fixed_shards": 4, "cores": 2})
        ['fixed_shards: 8 -> 4']
    """
    names = list(dict.fromkeys([*before, *now]))
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return [f"{name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b]


def _processor() -> str:
    """The CPU's name where Linux tells it: code is compiled for what a CPU can do."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line for line in file if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0].partition(":")[2].strip() if names else ""
    return f"{platform.machine()} {name}".strip()
