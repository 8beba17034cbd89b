"""What this machine has, found without starting JAX: GPUs, driver, packages, cores."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Nvidia:
    """The NVIDIA GPUs that this process can reach, and the version of the driver."""

    gpus: int = 0
    driver: str | None = None


def find_nvidia(root: Path = Path("/")) -> Nvidia:
    """Looks under `/dev` and `/proc`, and asks `nvidia-smi` where they say nothing.

    In a container that was started without GPUs the driver is seen, but no GPU.
    """
    gpus = sum(
        re.fullmatch(r"nvidia\d+", path.name) is not None
        for path in (root / "dev").glob("nvidia*")
    )
    version = root / "proc/driver/nvidia/version"
    driver = _version_in(version.read_text()) if version.exists() else None
    if gpus and driver:
        return Nvidia(gpus, driver)
    lines = _ask_nvidia_smi()  # the Linux inside Windows has no such files
    return Nvidia(
        gpus or len(lines), driver or (_version_in(lines[0]) if lines else None)
    )


def installed_versions() -> dict[str, str]:
    """The versions of jax, jaxlib and of every plugin that this JAX knows of.

    Example:
        >>> sorted(installed_versions())[:2]
        ['jax', 'jaxlib']
    """
    wanted = ["jax", "jaxlib"]
    for requirement in metadata.requires("jax") or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if name.endswith("-plugin"):
            wanted += [name, name.removesuffix("plugin") + "pjrt"]
        elif name == "libtpu":
            wanted.append(name)
    found = {}
    for name in wanted:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def jax_extras() -> frozenset[str]:
    """The extras of the installed JAX, such as `cuda13` in `jax[cuda13]`."""
    return frozenset(metadata.metadata("jax").get_all("Provides-Extra") or ())


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tensorflow_gpus(modules: Mapping[str, ModuleType] = sys.modules) -> int:
    """The GPUs that TensorFlow would take; 0 where nobody imported it."""
    tensorflow = modules.get("tensorflow")
    if tensorflow is None:
        return 0
    return len(tensorflow.config.get_visible_devices("GPU"))


def _version_in(text: str) -> str | None:
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _ask_nvidia_smi() -> list[str]:
    """One line a GPU, the driver's version; none without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in answer.stdout.splitlines() if _version_in(line)]
