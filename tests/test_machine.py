import importlib.metadata
import os
from types import SimpleNamespace

import jax
import jaxlib.version
import pytest

from lockstep.devices import machine
from lockstep.devices.machine import Nvidia, find_nvidia

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15\n"
    "GCC version:  gcc version 12.2.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n"


@pytest.fixture(autouse=True)
def no_real_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def plant_devices(root, *names):
    (root / "dev").mkdir()
    for name in names:
        (root / "dev" / name).touch()


def plant_driver(root, text):
    folder = root / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)


def plant_nvidia_smi(root, script):
    program = root / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "driver"), [(CLOSED, "535.183.01"), (OPEN, "580.65.06"), ("?\n", None)]
)
def test_counts_gpus_and_reads_the_driver(tmp_path, text, driver):
    plant_devices(tmp_path, "nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null")
    plant_driver(tmp_path, text)
    assert find_nvidia(tmp_path) == Nvidia(gpus=2, driver=driver)


def test_finds_nothing_on_a_plain_machine(tmp_path):
    assert find_nvidia(tmp_path) == Nvidia(gpus=0, driver=None)


def test_sees_the_driver_of_a_container_without_gpus(tmp_path):
    plant_driver(tmp_path, CLOSED)
    assert find_nvidia(tmp_path) == Nvidia(gpus=0, driver="535.183.01")


def test_asks_nvidia_smi_where_the_files_are_missing(tmp_path):
    plant_nvidia_smi(tmp_path, "echo 551.86; echo 551.86")
    assert find_nvidia(tmp_path) == Nvidia(gpus=2, driver="551.86")


@pytest.mark.parametrize("answer", ["echo No devices were found; exit 6", "exit 9"])
def test_believes_no_nvidia_smi_that_fails(tmp_path, answer):
    plant_nvidia_smi(tmp_path, answer)
    assert find_nvidia(tmp_path) == Nvidia(gpus=0, driver=None)


def test_survives_an_nvidia_smi_that_cannot_run(tmp_path):
    plant_nvidia_smi(tmp_path, "")
    (tmp_path / "bin/nvidia-smi").write_bytes(b"\x7fELF no program")
    assert find_nvidia(tmp_path) == Nvidia(gpus=0, driver=None)


def test_versions_are_those_that_run():
    found = machine.installed_versions()
    assert found["jax"] == jax.__version__
    assert found["jaxlib"] == jaxlib.version.__version__


def test_versions_name_every_plugin_of_this_jax(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "7")
    found = machine.installed_versions()
    plugins = {"jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu"}
    assert plugins <= found.keys()
    assert "numpy" not in found


def test_extras_are_those_of_the_installed_jax():
    extras = machine.jax_extras()
    assert {"cuda12", "cuda13", "tpu"} <= extras
    assert not {"cuda12_pip", "cuda12-pip"} & extras


def test_counts_the_cores_of_this_process():
    assert 1 <= machine.count_cores() <= (os.cpu_count() or 1)


def test_tensorflow_is_asked_only_if_imported():
    gpus = SimpleNamespace(
        config=SimpleNamespace(get_visible_devices=lambda kind: [kind, kind])
    )
    assert machine.tensorflow_gpus({}) == 0
    assert machine.tensorflow_gpus({"tensorflow": gpus}) == 2  # type: ignore[dict-item]
