"""Watches the processes of a run: the first failure ends all, and may start them anew.

Exit codes: 75 says that the run was told to stop and has saved its state; 70 and a
SIGABRT say that a process ended because another one had failed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from types import FrameType

from lockstep.processes import child
from lockstep.processes.cause import OWN
from lockstep.processes.guard import Guard
from lockstep.processes.output import Output

SAVED = 75
_OTHER_FAILED = 70
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
        self._told = tempfile.NamedTemporaryFile("w", prefix="lockstep-ended-")
        self._guard = Guard()
        inherited = {**os.environ, "LOCKSTEP_ENDED": self._told.name}
        port = child.free_port()
        self._children: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            variables = child.environment(inherited, index, count, port, restart)
            started = child.start(arguments, variables)
            self._guard.watch(started.pid)
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
            self._guard.release()
            self._told.close()
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
            self._tell(f"{self._name(index)} {how_it_ended(process.returncode)}\n")
            if process.returncode not in (0, SAVED) and self._limit is None:
                self._limit = time.monotonic() + _GRACE_S
        if self._limit is not None and time.monotonic() > self._limit:
            self._kill()

    def _judge(self) -> int:
        """The code of the run, with a last line that says whose it is."""
        failed = {i: code for i, code in self._ended.items() if code not in (0, SAVED)}
        if not failed:
            return SAVED if SAVED in self._ended.values() else 0
        told = {index for index in failed if self._output.cause(index).told}
        index = culprit(failed, self._killed, told)
        code, cause = failed[index], self._output.cause(index)
        last = cause.text if code > 0 else ""
        if code == -signal.SIGABRT:  # by JAX, of whose reason lockstep may have told
            last = cause.told
        if code < 0 and not last:
            last = self._output.show_kept(index)
        if self.signalled:
            name = signal.Signals(self.signalled).name
            self._output.say(f"ended by {name}")
            return 128 + self.signalled
        self._output.say(f"{self._name(index)} {how_it_ended(code)}")
        if last:
            self._output.say(last.removeprefix(OWN).removeprefix("lockstep run: "))
        return 128 - code if code < 0 else code

    def _name(self, index: int) -> str:
        return f"process {index} of {len(self._children)}"

    def _tell(self, text: str) -> None:
        """Write for processes that may still wait for the one that ended."""
        try:
            self._told.write(text)
            self._told.flush()
        except OSError:
            pass  # a full disk: they wait until initialize gives up

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on; the second one ends all processes at once."""
        if self.signalled:
            self._kill()
            return
        self.signalled = number
        self._limit = time.monotonic() + _SIGNAL_GRACE_S
        self._each(lambda process: process.send_signal(number))
        self._output.say(
            f"{signal.Signals(number).name} went to all processes; a second one, or "
            f"{_SIGNAL_GRACE_S:.0f} s, ends those that are left"
        )

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


def how_it_ended(code: int) -> str:
    """An exit code of `subprocess` in words.

    Example:
        >>> how_it_ended(0), how_it_ended(3)
        ('came to its end', 'failed with exit code 3')
        >>> how_it_ended(-9)
        'was ended by SIGKILL'
    """
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}" if code else "came to its end"


def culprit(
    failed: dict[int, int], killed: Set[int], told: Set[int] = frozenset()
) -> int:
    """The process that failed first by itself.

    One that aborted may have been ended by JAX because of another's failure, of which
    lockstep tells first, if it has the time.

    Args:
        failed: index -> exit code, negative for a signal, in the order of their ends.
        killed: those that the launcher itself has ended.
        told: those of which lockstep told why they end.

    Example:
        >>> culprit({0: 70, 2: -6, 1: 3, 3: -9}, killed={3}, told={0})
        1
    """

    def distance(index: int) -> int:
        code = failed[index]
        if code == _OTHER_FAILED or index in killed:
            return 3
        if code == -signal.SIGABRT:
            return 2 if index in told else 1
        return 0

    return min(failed, key=distance)
