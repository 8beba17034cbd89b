"""The facts that advice is drawn from: the machine, the packages, and JAX's choice."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from lockstep.devices.machine import (
    Nvidia,
    count_cores,
    find_nvidia,
    installed_versions,
    jax_extras,
    tensorflow_gpus,
)


@dataclass(frozen=True)
class Facts:
    """What there is to know; the defaults are a plain JAX on a machine of one core.

    `backend` is "none", and `start_error` says why, where JAX cannot start.
    `platforms` and `cpu_count` are the settings `jax_platforms` and
    `jax_num_cpu_devices` (-1: not set). `built_in_cuda` is true for a jaxlib that
    needs no CUDA plugin, as conda's.
    """

    backend: str = "cpu"
    start_error: str = ""
    local_devices: int = 1
    process_count: int = 1
    platforms: str | None = None
    cpu_count: int = -1
    nvidia: Nvidia = Nvidia()
    versions: Mapping[str, str] = field(default_factory=dict)
    extras: frozenset[str] = frozenset({"cuda12", "cuda13"})
    built_in_cuda: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    tensorflow_gpus: int = 0
    cores: int = 1

    @property
    def simulated_on_purpose(self) -> bool:
        """Whether this process was told to run on so many CPU devices."""
        return self.backend == "cpu" and self.cpu_count > 0

    @property
    def gpus_in_use(self) -> int:
        """The GPUs of this machine that JAX runs on in this process."""
        return self.local_devices if self.backend == "gpu" else 0


def gather_facts() -> Facts:
    """Asks the machine and JAX; starts JAX if it can start."""
    error = _start_jax()
    return Facts(
        backend="none" if error else jax.default_backend(),
        start_error=error,
        local_devices=0 if error else jax.local_device_count(),
        process_count=1 if error else jax.process_count(),
        platforms=jax.config.jax_platforms or None,
        cpu_count=jax.config.jax_num_cpu_devices,
        nvidia=find_nvidia(),
        versions=installed_versions(),
        extras=jax_extras(),
        built_in_cuda=importlib.util.find_spec("jaxlib.cuda") is not None,
        environment=dict(os.environ),
        tensorflow_gpus=tensorflow_gpus(),
        cores=count_cores(),
    )


def _start_jax() -> str:
    """Starts JAX; returns why it cannot, in its own words where it has some."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # jax_platforms=cuda in a CPU-only JAX is a bare AssertionError.
        return str(error) or "the installed JAX has no such platform"
    return ""
