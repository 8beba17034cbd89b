"""The actor on a node: starts one process of the run, and tells what becomes of it.

The training runs in a process of its own, as under `lockstep run`, and not inside the
actor: there it has a main thread, may end itself in any way, and the actor still
answers while it waits in a collective.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.processes.child import environment, start
from lockstep.processes.guard import Guard
from lockstep.processes.output import Output

_TICK_S = 0.05


@dataclass(frozen=True)
class Task:
    """What every worker runs.

    Attributes:
        arguments: those of `lockstep run`: a script and its own arguments.
        call: in place of them a pickled function with its arguments; see `called`.
        environment: variables for the process.
    """

    arguments: tuple[str, ...]
    call: bytes | None
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """News of a process.

    Attributes:
        out: what it wrote since the last report.
        err: the same of standard error.
        code: its exit code, negative for a signal; `None` while it runs.
        last: the last line that it wrote to standard error.
        native: long reports of native code, for the case that nothing else says why.
        lost: whether the worker is gone, so that nothing more can be known.
    """

    out: bytes = b""
    err: bytes = b""
    code: int | None = None
    last: str = ""
    native: bytes = b""
    lost: bool = False


# A worker takes its process with it, so that is as if killed.
LOST = Report(code=-int(signal.SIGKILL), lost=True)


class Worker:
    """One process of the run, on the node where Ray has put this actor."""

    def __init__(self, index: int, host: str) -> None:
        """Nothing runs yet.

        Args:
            index: the number of the process.
            host: the address of this node.
        """
        self._index, self._host = index, host
        self._out, self._err = _Sink(), _Sink()
        self._output = Output(self._out, self._err)  # pyright: ignore[reportArgumentType]
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = Guard()
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ray-"))

    def place(self) -> tuple[str, str]:
        """This node's name, and an address on which nobody listens."""
        with socket.create_server((self._host, 0)) as server:
            port = server.getsockname()[1]
        return socket.gethostname(), f"{self._host}:{port}"

    def start(self, task: Task, count: int, address: str, restart: int) -> None:
        """Start the process; `address` is where process 0 listens."""
        arguments = task.arguments
        if task.call is not None:
            (self._folder / "call").write_bytes(task.call)
            arguments = ("-m", "lockstep.ray.called", str(self._folder))
        inherited = {**os.environ, **task.environment}
        own = {
            "LOCKSTEP_COORDINATOR": address,
            "LOCKSTEP_LOCAL_COUNT": "1",  # Ray has shared out the GPUs of the node
            "LOCKSTEP_STARTED_BY": "Ray",
        }
        variables = environment(inherited, self._index, count, 0, restart) | own
        self._process = start(arguments, variables)
        self._guard.watch(self._process.pid)
        assert self._process.stdout and self._process.stderr
        self._output.follow(self._index, self._process.stdout, self._process.stderr)

    def poll(self, wait_s: float) -> Report:
        """News of the process: when there are some, or after a while."""
        assert self._process is not None
        deadline = time.monotonic() + wait_s
        while (code := self._process.poll()) is None:
            out, err = self._out.take(), self._err.take()
            if out or err or time.monotonic() > deadline:
                return Report(out, err)
            time.sleep(_TICK_S)
        self._output.finish()
        out, err = self._out.take(), self._err.take()
        self._output.show_kept(self._index)
        last = self._output.cause(self._index).text
        return Report(out, err, code, last, native=self._err.take())

    def ask_to_stop(self) -> None:
        """Let the process save and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the process, and what it has started itself."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def result(self) -> bytes | None:
        """What the function returned, pickled."""
        path = self._folder / "result"
        return path.read_bytes() if path.exists() else None

    def clear(self) -> None:
        """Leave nothing behind: no process and no file."""
        self.end()
        self._guard.release()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Sink:
    """A stream that is written by one thread and emptied by another."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()

    def write(self, part: bytes) -> None:
        self._parts.append(part)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        """All that was written since the last time."""
        return b"".join(self._parts.popleft() for _ in range(len(self._parts)))
