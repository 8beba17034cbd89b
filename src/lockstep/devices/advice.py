"""Advice for a person who sees fewer devices, or less memory, than expected.

Every rule is a pure function of `Facts` that returns a sentence or `None`.
"""

from lockstep.devices.facts import Facts
from lockstep.simulation import requested_counts

_MEMORY_SETTINGS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
}


def worth_knowing(facts: Facts) -> tuple[str, ...]:
    """What these facts are reason to say, beside the reasons for idle GPUs.

    Example:
        >>> print(*worth_knowing(Facts(local_devices=8, cores=2)))
        8 simulated devices share 2 cores: results are those of real devices, times not
    """
    rules = (
        _cannot_start,
        _gpus_outside,
        _late_platforms,
        _late_count,
        _one_cpu_device,
        _more_devices_than_cores,
        _tensorflow,
        _preallocation,
    )
    return tuple(text for rule in rules if (text := rule(facts)) is not None)


def _cannot_start(facts: Facts) -> str | None:
    if not facts.start_error:
        return None
    return (
        f"JAX cannot start on jax_platforms={facts.platforms} ({facts.start_error}): "
        "unset JAX_PLATFORMS, or install the plugin of that platform"
    )


def _gpus_outside(facts: Facts) -> str | None:
    if facts.nvidia.gpus or facts.nvidia.driver is None:
        return None
    return (
        f"an NVIDIA driver ({facts.nvidia.driver}) runs here, but this process can "
        "reach no GPU (no /dev/nvidia0): a container needs its GPUs given to it, as in "
        "`docker run --gpus all`"
    )


def _late_platforms(facts: Facts) -> str | None:
    asked = facts.environment.get("JAX_PLATFORMS") or None
    if asked in (None, facts.platforms) or facts.simulated_on_purpose:
        return None
    return (
        f"JAX_PLATFORMS={asked} has no effect: it was set after JAX was imported, or "
        f"the JAX setting jax_platforms={facts.platforms} replaced it; set it before "
        "`import jax`"
    )


def _late_count(facts: Facts) -> str | None:
    if facts.backend != "cpu" or facts.cpu_count > 0:
        return None
    for variable, count in requested_counts(facts.environment).items():
        if count != facts.local_devices:
            return (
                f"{variable} asks for {count} CPU devices, but JAX had already started "
                f"with {facts.local_devices}: start with `lockstep run --simulate "
                f"{count} script.py`, or call simulate_devices({count}) before the "
                "first JAX operation"
            )
    return None


def _one_cpu_device(facts: Facts) -> str | None:
    if facts.backend != "cpu" or facts.local_devices > 1:
        return None
    return (
        "JAX runs on one CPU device; to test on 8 stand-ins, start with `lockstep run "
        "--simulate 8 script.py`, or call simulate_devices(8) before anything starts "
        "JAX, as this report does (in a notebook: restart the kernel first)"
    )


def _more_devices_than_cores(facts: Facts) -> str | None:
    if facts.backend != "cpu" or facts.local_devices <= max(1, facts.cores):
        return None
    return (
        f"{facts.local_devices} simulated devices share {facts.cores} "
        f"core{'s' * (facts.cores != 1)}: results are those of real devices, times not"
    )


def _tensorflow(facts: Facts) -> str | None:
    count = facts.tensorflow_gpus
    if not count:
        return None
    return (
        f"TensorFlow is imported and sees {count} GPU{'s' * (count != 1)}: at its "
        "first operation it takes their memory from JAX. Hide them with "
        'tf.config.set_visible_devices([], "GPU")'
    )


def _preallocation(facts: Facts) -> str | None:
    if facts.backend != "gpu" or _MEMORY_SETTINGS & facts.environment.keys():
        return None
    return (
        "JAX takes 75% of each GPU's memory when it starts, whatever the model needs; "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false or XLA_CLIENT_MEM_FRACTION=.50 change that"
    )
