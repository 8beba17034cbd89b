"""One script in two processes on this machine, connected on the loopback address."""

import os
import subprocess
import sys
from pathlib import Path

import portpicker

SOURCE = Path(__file__).parents[1] / "src"


def outputs_of(script: Path, tmp_path_factory) -> list[str]:
    """What each process wrote, after both have ended; each has two CPU devices."""
    address = f"127.0.0.1:{portpicker.pick_unused_port()}"
    settings = {
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, address, str(number)],
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
