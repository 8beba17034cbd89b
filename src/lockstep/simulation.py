"""Simulated devices: one CPU that stands in for many devices."""

import os
import re
import sys
from collections.abc import Mapping

from lockstep.notices import say_once

_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def simulate_devices(count: int) -> None:
    """Makes JAX run on `count` simulated CPU devices.

    Call it before the first JAX operation: JAX chooses its devices once. Calling it
    again with the same count changes nothing. It wins over `JAX_NUM_CPU_DEVICES` and
    a device count in `XLA_FLAGS`, and says so.

    Args:
        count: how many devices this process shall see.

    Raises:
        TypeError, ValueError: `count` is no positive int.
        RuntimeError: JAX has already started, on other devices.

    Example:
        >>> simulate_devices(8)
        >>> import jax
        >>> jax.device_count()
        8
    """
    import jax

    _check_count(count)
    if backend_started():
        if jax.default_backend() == "cpu" and jax.local_device_count() == count:
            return
        raise RuntimeError(_too_late(count))
    _say_what_loses(count, os.environ)
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")


def simulate_by_environment(count: int) -> None:
    """Does the same for a process that has not imported JAX yet, and its children.

    JAX reads its variables when it is imported, so a script that sets some of its own
    in its first lines still gets them.

    Raises:
        TypeError, ValueError: `count` is no positive int.
        RuntimeError: JAX is imported and has started on other devices.
    """
    _check_count(count)
    if "jax" in sys.modules:
        return simulate_devices(count)
    _say_what_loses(count, os.environ)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    os.environ["JAX_PLATFORMS"] = "cpu"


def backend_started() -> bool:
    """Whether JAX has chosen its devices, found out without making it choose.

    JAX has no public question for that, but from then on it refuses another value of
    `jax_num_cpu_devices`. Until then the value is put back at once.

    Example:
        >>> import jax
        >>> _ = jax.devices()
        >>> backend_started()
        True
    """
    import jax

    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def requested_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """The device counts that an environment asks for, by the variable that does.

    Example:
        >>> requested_counts({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
        {'XLA_FLAGS': 4}
    """
    counts = {}
    flags = _COUNT_FLAG.findall(environ.get("XLA_FLAGS", ""))
    if flags:  # XLA takes the last one
        counts["XLA_FLAGS"] = int(flags[-1])
    if environ.get("JAX_NUM_CPU_DEVICES", "").isdigit():
        counts["JAX_NUM_CPU_DEVICES"] = int(environ["JAX_NUM_CPU_DEVICES"])
    return counts


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"a number of simulated devices is an int, not {type(count).__name__}"
        )
    if count < 1:
        raise ValueError(f"cannot simulate {count} devices: use 1 or more")


def _say_what_loses(count: int, environ: Mapping[str, str]) -> None:
    """An inherited count neither wins nor loses in silence."""
    for variable, other in requested_counts(environ).items():
        if other != count:
            say_once(
                f"simulate {count} over {variable}",
                f"simulating {count} devices, not the {other} that {variable} in the "
                f"environment asks for; unset {variable} if nothing else needs it",
            )


def _too_late(count: int) -> str:
    import jax

    have = jax.local_device_count()
    return (
        f"simulate_devices({count}) comes too late: JAX has already started with "
        f"{have} {jax.default_backend()} device{'s' * (have != 1)}, and chooses only "
        "once. Call it before the first JAX operation (in a notebook: restart the "
        f"kernel and call it first), or start with `lockstep run --simulate {count} "
        "script.py`"
    )
