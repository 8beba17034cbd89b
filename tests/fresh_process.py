"""A Python process of its own, for what depends on how a process starts."""

import os
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src"


def run_python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments...` without the tests' own settings of JAX and XLA."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "LOCKSTEP_"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=inherited | {"PYTHONPATH": str(_SOURCE)} | environment,
    )


def run_lockstep(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `lockstep arguments...`."""
    return run_python("-m", "lockstep", *arguments, cwd=cwd, **environment)
