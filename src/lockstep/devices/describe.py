"""`describe_devices`: what JAX runs on, and what to do if that is too little."""

# jaxlib has no type stubs, so that to pyright `jax.Device` is a variable.
# pyright: reportInvalidTypeForm=false

import platform
from collections import Counter

import jax

from lockstep.devices.advice import worth_knowing
from lockstep.devices.facts import gather_facts
from lockstep.devices.idle_gpus import why_idle
from lockstep.devices.report import DeviceReport


def describe_devices() -> DeviceReport:
    """Reports the devices that JAX runs on, with advice; starts JAX.

    Print the report, show it with rich, or leave it as the last line of a notebook
    cell. Where JAX cannot start at all, the backend is "none" and the advice says why.

    Example:
        >>> report = describe_devices()
        >>> report.backend, report.total_devices, report.process_count
        ('cpu', 8, 1)
    """
    facts = gather_facts()
    started = facts.backend != "none"
    devices = jax.devices() if started else []
    local = jax.local_devices() if started else []
    idle = why_idle(facts)
    return DeviceReport(
        backend=facts.backend,
        total_devices=len(devices),
        local_devices=len(local),
        kinds=dict(Counter(device.device_kind for device in devices)),
        memory_bytes=tuple(_memory(device) for device in local),
        process_index=jax.process_index() if started else 0,
        process_count=facts.process_count,
        versions={"python": platform.python_version(), **facts.versions},
        advice=idle + worth_knowing(facts),
        idle_hardware=bool(idle),
    )


def _memory(device: jax.Device) -> int | None:
    """The bytes that JAX may allocate on a device, where it tells."""
    return (device.memory_stats() or {}).get("bytes_limit")
