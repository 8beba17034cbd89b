"""Commands that start several processes: their lines as they come, and a time limit."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "cluster" / "train.py"

_NOT_INHERITED = ("JAX_", "XLA_", "LOCKSTEP_", "SLURM_", "OMPI_", "RAY_")


def environment(**more: str) -> dict[str, str]:
    """This process's variables without its settings of JAX and of launchers."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_INHERITED)
    }
    tools = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"}
    return inherited | tools | {"JAX_PLATFORMS": "cpu"} | more


class Launch:
    """A command under way; leaving the context ends it and what it has started."""

    def __init__(self, *command: object, limit_s: float = 60, **more: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._limit = threading.Timer(limit_s, self._kill)
        self._limit.start()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        if self._process.poll() is None:
            self._kill()
            self._process.wait(10)
        if self._process.stdout:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} before the end:\n{self.text}")

    def finish(self) -> int:
        """Read to the end; the exit code."""
        assert self._process.stdout
        self.lines += self._process.stdout
        return self._process.wait(10)

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def losses_in(text: str) -> dict[int, float]:
    """What train.py printed: step -> loss."""
    found = re.findall(r"step (\d+): loss ([\d.]+)", text)
    return {int(step): float(loss) for step, loss in found}


def pid_of(process: int, text: str) -> int:
    """The process id that the last start-up table shows."""
    found = re.findall(rf"process {process}  \S+  pid (\d+)", text)
    assert found, text
    return int(found[-1])
