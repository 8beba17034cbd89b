"""The start-up table: every process, its machine and its devices."""

import os
import platform
import socket
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from lockstep.distributed.agreement import odd_one


def versions() -> dict[str, str]:
    """The versions that must be the same on all processes."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("jax", "jaxlib", "lockstep-jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def facts() -> dict[str, Any]:
    """What this process has; starts the backend, which waits for all processes."""
    devices = jax.local_devices()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": len(devices),
        "kind": f"{devices[0].device_kind} ({devices[0].platform})",
        "x64": bool(jax.config.jax_enable_x64),
    }


def check(rows: Sequence[dict[str, Any]]) -> None:
    """Refuse processes that cannot train together.

    Raises:
        RuntimeError: names the process that has other devices or settings than most.
    """
    for name, what in (
        ("devices", "devices"),
        ("kind", "a device of kind"),
        ("x64", "jax_enable_x64 ="),
    ):
        odd, usual = odd_one([row[name] for row in rows])
        if odd is not None:
            a, b = rows[odd][name], rows[usual][name]
            first, second = (
                (f"{a} {what}", f"{b}") if name == "devices" else (f"{what} {a}", b)
            )
            raise RuntimeError(
                f"process {odd} ({rows[odd]['host']}) has {first}, and process {usual} "
                f"({rows[usual]['host']}) has {second}: every process needs the same"
            )


def table(rows: Sequence[dict[str, Any]], by: str) -> str:
    """One line a process, and what they share.

    Example:
        >>> row = {"host": "a", "pid": 7, "devices": 2, "kind": "cpu", "x64": False}
        >>> print(table([row, row | {"pid": 8}], "lockstep run"))
        2 processes (lockstep run), 4 devices of kind cpu
          process 0  a  pid 7  devices 0-1
          process 1  a  pid 8  devices 2-3
    """
    total = sum(row["devices"] for row in rows)
    lines = [f"{len(rows)} processes ({by}), {total} devices of kind {rows[0]['kind']}"]
    first = 0
    for index, row in enumerate(rows):
        last = first + row["devices"] - 1
        span = f"devices {first}-{last}" if last > first else f"device {first}"
        if index < 16 or index == len(rows) - 1:
            lines.append(f"  process {index}  {row['host']}  pid {row['pid']}  {span}")
        elif index == 16:
            lines.append("  ...")
        first = last + 1
    return "\n".join(lines)


def versions_line() -> str:
    """The versions in one line; arrivals has found them equal."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())
