"""Signals that ask a run to stop: SIGTERM from a scheduler, SIGINT from a keyboard.

A run that keeps checkpoints takes them as a request, which the loop reads between two
steps: it finishes the step, saves, and ends with an exit code that says "start me
again". Whatever the run was in (a step, an evaluation, a compile, a save) ends first.
"""

import logging
import signal
import threading
from types import FrameType
from typing import Any

from lockstep.distributed.session import current

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later

_log = logging.getLogger("lockstep")


class Preempted(SystemExit):
    """The run was asked to stop, and has saved; the process exits with 75."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE


class StopSignals:
    """A context in which SIGTERM and SIGINT are requests to stop after a step.

    A second SIGINT, or one after a SIGTERM, raises `KeyboardInterrupt` at once. Outside
    of the main thread, which alone may handle signals, nothing is changed.

    Example:
        >>> with StopSignals() as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     signals.asked(step=3)
        'SIGTERM'
    """

    def __init__(self) -> None:
        self._asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # A handler that was not set from Python cannot be put back.
                if signal.getsignal(number) is not None:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def asked(self, step: int) -> str | None:
        """The name of the signal that asks the run to stop after `step`, if any.

        Of several processes each asks after every step, and all get the same answer at
        the same step, whichever of them got the signal.
        """
        session = current()
        if session is None:
            return self._asked
        if self._asked:
            session.line.stopping.ask(self._asked)
        return session.line.stopping.reached()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = self._asked or name
        again = "; once more ends it at once" if number == signal.SIGINT else ""
        _log.warning("%s: the run ends after this step, and saves%s", name, again)
