"""What several processes write, as whole lines with the process's number.

Native code writes long reports when a peer dies, and they would bury the one line that
says why. They are kept back, and shown only where no process gave a reason.
"""

import re
import threading
from collections import deque
from typing import IO, BinaryIO

from lockstep.processes.cause import Cause

# abseil's log lines for errors, the stacks that follow, and what C++ and Python say of
# an abort.
_NATIVE = re.compile(
    rb"[EF]\d{4} \d\d:\d\d:\d\d|W\d{4} [^]]* preemption_sync|E0000 "
    rb"|\*\*\* Check failure stack"
    rb"|\s+@\s+0x|\s+@\s+\(nil\)|terminate called|  what\(\):|Fatal Python error"
    rb"|Current thread 0x|Extension modules:|Thread 0x|\*\*\* (SIG|Aborted)"
    rb"|\s+[\w.]*Error code:|The full error message|.*RPC: /tensorflow"
    rb"|:[A-Z_]+:|Additional GRPC error|=== Source Location Trace|external/xla"
    rb"|RPC: /|The tasks have crashed|\. This is only expected if one of the tasks"
)
_ABORT = b"  what():"  # C++ on the error that nobody caught
_GREETING = b"[Gloo] Rank "  # once for each process and mesh, when all is well


class Output:
    """Shows the lines of all processes, one at a time."""

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        """Lines go to `out` and `err`."""
        self._out, self._err = out, err
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._kept: dict[int, deque[bytes]] = {}
        self._causes: dict[int, Cause] = {}

    def follow(self, index: int, out: IO[bytes], err: IO[bytes]) -> None:
        """Show what a process writes until it closes both streams."""
        self._kept[index] = deque(maxlen=200)
        self._causes[index] = Cause()
        for stream, to in ((out, self._out), (err, self._err)):
            reader = threading.Thread(
                target=self._copy, args=(index, stream, to), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def finish(self, timeout_s: float = 5.0) -> None:
        """Wait for the last lines; a grandchild may hold a stream open for ever."""
        for reader in self._readers:
            reader.join(timeout_s)
        self._readers.clear()

    def cause(self, index: int) -> Cause:
        """Why a process failed, by what it wrote to standard error."""
        return self._causes[index]

    def show_kept(self, index: int) -> str:
        """Show the reports of native code after all; what they say of an abort."""
        said = ""
        for line in self._kept[index]:
            self._show(index, line, self._err)
            if line.startswith(_ABORT):
                said = line.decode(errors="replace").removeprefix(_ABORT.decode())
        self._kept[index].clear()
        return said.strip()

    def say(self, text: str) -> None:
        """Something of the launcher's own."""
        lines = [f"lockstep run: {line}\n" for line in text.splitlines()]
        with self._lock:
            self._err.write("".join(lines).encode(errors="replace"))
            self._err.flush()

    def _copy(self, index: int, stream: IO[bytes], to: BinaryIO) -> None:
        with stream:
            for line in stream:
                if line.startswith(_GREETING):
                    continue
                if _NATIVE.match(line):
                    self._kept[index].append(line)
                    continue
                if to is self._err:
                    self._causes[index].follow(line.decode(errors="replace"))
                self._show(index, line, to)

    def _show(self, index: int, line: bytes, to: BinaryIO) -> None:
        with self._lock:
            to.write(b"[%d] " % index + line.rstrip(b"\n") + b"\n")
            to.flush()
