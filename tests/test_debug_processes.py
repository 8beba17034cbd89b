"""The tools of `lockstep.debug` over two processes; see `debug_in_two_processes.py`."""

import os
import subprocess
import sys
from pathlib import Path

import portpicker
import pytest

SCRIPT = Path(__file__).with_name("debug_in_two_processes.py")
SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
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
            cwd=tmp_path_factory.mktemp(f"process{number}"),
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


@pytest.mark.parametrize(
    "check",
    [
        "equal_copies_pass",
        "one_flipped_bit_is_found_by_both",
        "a_bad_row_is_named_by_both",
        "one_process_alone_saves_it",
    ],
)
def test_holds_in_both_processes(both, check):
    for output in both:
        assert f"holds: {check}\n" in output, output[-3000:]
