"""Watches the processes of a run: the first failure ends all, and may start them anew.

Exit codes: 75 says that the run was told to stop and has saved its state; 70 and a
SIGABRT say that a process ended because another one had failed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from lockstep.processes import child
from lockstep.processes.output import Output

SAVED = 75
_FOLLOWERS = (70, -signal.SIGABRT)  # they failed because another process did
_GRACE_S = 6.0  # for the others to say what they know
_SIGNAL_GRACE_S = 60.0  # to save a checkpoint
_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_processes(count: int, arguments: Sequence[str], *, max_restarts: int) -> int:
    """Run `lockstep run arguments...` in `count` processes, and return an exit code.

    Args:
        count: how many processes.
        arguments: options, the script and its arguments.
        max_restarts: after a failure, start all processes again so many times; the
            script goes on from its last checkpoint.

    Returns:
        0, or the code of the process that failed first (128 + n for signal n).
    """
    output = Output(sys.stdout.buffer, sys.stderr.buffer)
    for restart in range(max_restarts + 1):
        attempt = Attempt(count, arguments, restart, output)
        code = attempt.run()
        if code in (0, SAVED) or attempt.signalled:
            return code
        if restart < max_restarts:
            output.say(f"starting all {count} again, {restart + 1} of {max_restarts}")
    return code


class Attempt:
    """All processes, from their start to the end of the last one.

    Attributes:
        signalled: the signal that the launcher was sent, and passed on.
    """

    def __init__(
        self, count: int, arguments: Sequence[str], restart: int, output: Output
    ) -> None:
        """Start the processes, on a port that no other attempt has used."""
        self.signalled = 0
        self._output = output
        self._limit: float | None = None
        self._killed: set[int] = set()
        self._ended: dict[int, int] = {}  # index -> code, in the order of their ends
        port = child.free_port()
        self._children: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            started = child.start(index, count, port, restart, arguments)
            self._children.append(started)
            assert started.stdout and started.stderr
            output.follow(index, started.stdout, started.stderr)

    def run(self) -> int:
        """Watch until all have ended; the exit code of the run."""
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)
        try:
            while len(self._ended) < len(self._children):
                self._look()
                time.sleep(_POLL_S)
        finally:
            self._kill()
            self._output.finish()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._judge()

    def _look(self) -> None:
        """Note who has ended; end the others some time after a failure."""
        for index, process in enumerate(self._children):
            if index in self._ended or process.poll() is None:
                continue
            self._ended[index] = process.returncode
            if process.returncode not in (0, SAVED) and self._limit is None:
                self._limit = time.monotonic() + _GRACE_S
        if self._limit is not None and time.monotonic() > self._limit:
            self._kill()

    def _judge(self) -> int:
        """The code of the run, with a last line that says whose it is."""
        failed = {i: code for i, code in self._ended.items() if code not in (0, SAVED)}
        if not failed:
            return SAVED if SAVED in self._ended.values() else 0
        index = culprit(failed, self._killed)
        code = failed[index]
        last = self._output.last_line(index) if code > 0 else ""
        if code == -signal.SIGABRT:  # by JAX, of whose reason lockstep may have told
            last = self._output.last_told(index)
        if code < 0:
            if not last:
                self._output.show_kept(index)
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"failed with exit code {code}"
        if self.signalled:
            name = signal.Signals(self.signalled).name
            self._output.say(f"ended by {name}")
            return 128 + self.signalled
        self._output.say(f"process {index} of {len(self._children)} {how}")
        if last:
            self._output.say(last)
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on; the second one ends all processes at once."""
        if self.signalled:
            self._kill()
            return
        self.signalled = number
        self._limit = time.monotonic() + _SIGNAL_GRACE_S
        self._each(lambda process: process.send_signal(number))

    def _kill(self) -> None:
        """End the processes that are left, and what they have started themselves."""
        self._killed |= set(range(len(self._children))) - set(self._ended)
        self._each(lambda process: os.killpg(process.pid, signal.SIGKILL))

    def _each(self, act: Callable[[subprocess.Popen[bytes]], object]) -> None:
        for process in self._children:
            try:
                act(process)
            except ProcessLookupError:
                pass


def culprit(failed: dict[int, int], killed: set[int]) -> int:
    """The process that failed first by itself.

    Args:
        failed: index -> exit code, negative for a signal, in the order of their ends.
        killed: those that the launcher itself has ended.

    Example:
        >>> culprit({0: 70, 2: -6, 1: 3, 3: -9}, killed={3})
        1
    """
    own = [i for i, code in failed.items() if code not in _FOLLOWERS]
    return next((i for i in own if i not in killed), next(iter(failed)))
