"""One attempt: all processes from their start to their end, watched by the driver."""

import sys
import time
from typing import Any

from lockstep.preemption import EXIT_CODE, StopSignals
from lockstep.processes.supervise import culprit
from lockstep.ray.worker import LOST, Report, Task

_GRACE_S = 6.0  # for the others to say what they know
_STOP_GRACE_S = 60.0  # to save a checkpoint
_KILL_S = 10.0  # for a worker to end its process; then it counts as lost


class Attempt:
    """Watches a crew until the last process has ended.

    Attributes:
        stopped: the signal for which the driver asked the processes to stop.
        saved: whether they were asked to stop, by anyone, and have saved.
        failure: who failed and its last words; `None` where all went well.
    """

    def __init__(self, crew: Any) -> None:
        """`crew` is a `Crew`."""
        self.stopped: str | None = None
        self.saved = False
        self.failure: str | None = None
        self._crew = crew
        self._ended: dict[int, Report] = {}  # in the order of their ends
        self._killed: set[int] = set()
        self._limit: float | None = None

    def run(self, task: Task, restart: int, signals: StopSignals) -> None:
        """Start the processes, and watch until all have ended."""
        self._crew.start(task, restart)
        while len(self._ended) < self._crew.count:
            for index, report in self._crew.news():
                self._hear(index, report)
            self._ask_to_stop(signals)
            self._end_the_others()
        codes = {report.code for report in self._ended.values()}
        self.saved = EXIT_CODE in codes and codes <= {0, EXIT_CODE}
        self.failure = self._judge()

    def _hear(self, index: int, report: Report) -> None:
        _show(report.out, report.err)
        if report.code is None:
            return
        self._ended[index] = report
        if _is_failure(report) and self._limit is None:
            self._limit = time.monotonic() + _GRACE_S

    def _ask_to_stop(self, signals: StopSignals) -> None:
        """Pass a signal on that the driver was sent."""
        signal = signals.asked(step=0)
        if signal is not None and self.stopped is None:
            self.stopped = signal
            self._limit = time.monotonic() + _STOP_GRACE_S
            self._crew.ask_to_stop()

    def _end_the_others(self) -> None:
        """Some time after a failure: kill them, then give those up that do not die."""
        if self._limit is None or time.monotonic() < self._limit:
            return
        running = set(range(self._crew.count)) - set(self._ended)
        if not self._killed:
            self._killed = running
            self._limit += _KILL_S
            for index in running:
                self._crew.kill(index)
            return
        for index in running:
            self._ended[index] = LOST

    def _judge(self) -> str | None:
        failed = {i: r.code or 0 for i, r in self._ended.items() if _is_failure(r)}
        if not failed:
            return None
        index = culprit(failed, self._killed)
        code, report = failed[index], self._ended[index]
        how = f"failed with exit code {code}"
        if report.lost:
            how = "was lost: its Ray worker is gone, or its machine"
        elif code < 0:
            _show(b"", report.native)
            how = f"was ended by signal {-code}"
        last = f": {report.last}" if report.last else ""
        return f"{self._crew.names[index]} {how}{last}"


def _is_failure(report: Report) -> bool:
    return report.code not in (0, EXIT_CODE)


def _show(out: bytes, err: bytes) -> None:
    """Whole lines, on the streams of the driver, which a notebook may have replaced."""
    for stream, part in ((sys.stdout, out), (sys.stderr, err)):
        if part:
            stream.write(part.decode(errors="replace"))
            stream.flush()
