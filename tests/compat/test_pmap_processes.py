"""`compat.pmap` over two processes; see `pmap_in_two_processes.py`."""

import os
import subprocess
import sys
from pathlib import Path

import portpicker
import pytest

SCRIPT = Path(__file__).with_name("pmap_in_two_processes.py")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def both():
    """What each of the two processes wrote, after both have ended."""
    address = f"127.0.0.1:{portpicker.pick_unused_port()}"
    settings = {
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, address, str(number)],
            env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=120)[0])
        finally:
            process.kill()
    return outputs


def names_of_checks():
    text = SCRIPT.read_text().partition("CHECKS = (")[2].partition(")")[0]
    return [name.strip(" ,") for name in text.strip().splitlines()]


@pytest.mark.parametrize("check", names_of_checks())
def test_holds_in_both_processes(both, check):
    for output in both:
        assert f"holds: {check}\n" in output, output[-3000:]
