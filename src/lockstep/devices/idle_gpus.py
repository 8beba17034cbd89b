"""Why JAX leaves NVIDIA GPUs of this machine idle.

Every rule is a pure function of `Facts` that returns a sentence or `None`.
"""

import re
from collections.abc import Mapping

from lockstep.devices.facts import Facts

# The oldest Linux driver that each CUDA release runs on, newest release first.
_OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}


def why_idle(facts: Facts) -> tuple[str, ...]:
    """The reasons, each with the way out; none if nothing is idle by mistake.

    Example:
        >>> from lockstep.devices.machine import Nvidia
        >>> facts = Facts(nvidia=Nvidia(gpus=1), environment={"JAX_PLATFORMS": "cpu"},
        ...               platforms="cpu", versions={"jax-cuda13-plugin": "0.12.0",
        ...                                          "jaxlib": "0.12.0"})
        >>> print(*why_idle(facts))
        JAX_PLATFORMS=cpu keeps JAX from the 1 NVIDIA GPU of this machine: unset it
    """
    used = facts.gpus_in_use
    if facts.simulated_on_purpose or used >= facts.nvidia.gpus:
        return ()
    if used:
        return _said(_hidden(facts))
    found = _said(
        _cpu_only_jax(facts),
        _other_version(facts),
        _old_driver(facts),
        _hidden(facts),
        _other_platform(facts),
    )
    return found or (_unexplained(facts),)


def _said(*texts: str | None) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def _cpu_only_jax(facts: Facts) -> str | None:
    if _cuda_plugins(facts.versions) or facts.built_in_cuda:
        return None
    text = (
        f"this machine has {_gpus(facts)}, but the installed JAX is for the CPU only "
        f"(it has no CUDA plugin): {_install(facts)}"
    )
    if not {"cuda12_pip", "cuda12-pip"} & facts.extras:
        text += (
            '. The "jax[cuda12_pip]" of older guides no longer exists: pip warns about '
            "it and installs the CPU-only JAX"
        )
    return text


def _other_version(facts: Facts) -> str | None:
    jaxlib = facts.versions.get("jaxlib", "")
    for name, version in _cuda_plugins(facts.versions).items():
        if _numbers(version) != _numbers(jaxlib):
            return (
                f"{name} {version} does not belong to jaxlib {jaxlib}, so JAX does not "
                f"use it: {_install(facts)}"
            )
    return None


def _old_driver(facts: Facts) -> str | None:
    major = _driver_major(facts)
    for release, oldest in _OLDEST_DRIVER.items():
        if f"jax-{release}-plugin" in facts.versions and major and major < oldest:
            return (
                f"the NVIDIA driver {facts.nvidia.driver} is too old for the installed "
                f"jax-{release}-plugin, which needs {oldest} or newer: "
                f"{_install(facts)}"
            )
    return None


def _hidden(facts: Facts) -> str | None:
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or facts.process_count > 1:
        return None  # of several processes each takes its own GPUs
    return (
        f"CUDA_VISIBLE_DEVICES={visible!r} lets JAX see {facts.gpus_in_use} of "
        f"{_gpus(facts)}: unset it, or list the numbers of the GPUs to use"
    )


def _other_platform(facts: Facts) -> str | None:
    platforms = facts.platforms
    if platforms is None or {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    from_environment = facts.environment.get("JAX_PLATFORMS") == platforms
    setting = "JAX_PLATFORMS" if from_environment else "the JAX setting jax_platforms"
    return (
        f"{setting}={platforms} keeps JAX from the {_gpus(facts)} of this machine: "
        "unset it"
    )


def _unexplained(facts: Facts) -> str:
    return (
        f"this machine has {_gpus(facts)}, but JAX uses none; it gives the reason to "
        "`JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'`"
    )


def _install(facts: Facts) -> str:
    """The command that installs the newest CUDA release this driver can run."""
    major = _driver_major(facts)
    offered = [name for name in _OLDEST_DRIVER if name in facts.extras]
    for name in offered:
        if major is None or major >= _OLDEST_DRIVER[name]:
            return f'pip install -U "jax[{name}]"'
    if not offered:
        return "see https://docs.jax.dev/en/latest/installation.html"
    oldest = offered[-1]
    return (
        f"update the NVIDIA driver {facts.nvidia.driver} to {_OLDEST_DRIVER[oldest]} "
        f'or newer, then pip install -U "jax[{oldest}]"'
    )


def _cuda_plugins(versions: Mapping[str, str]) -> dict[str, str]:
    return {
        name: version
        for name, version in versions.items()
        if re.fullmatch(r"jax-cuda\d+-plugin", name)
    }


def _numbers(version: str) -> str:
    """The numeric start of a version: what jaxlib compares with its plugin's."""
    found = re.match(r"\d+(\.\d+)*", version)
    return found.group() if found else version


def _driver_major(facts: Facts) -> int | None:
    driver = facts.nvidia.driver
    return int(driver.split(".")[0]) if driver else None


def _gpus(facts: Facts) -> str:
    count = facts.nvidia.gpus
    return f"{count} NVIDIA GPU{'s' * (count != 1)}"
