"""The end of a process, good or bad, told to the others.

A process that raises would wait at its exit for the others, which wait for it in a
collective, and none would say why. So the error is printed, told, and the process ends
without its handlers at exit.
"""

import atexit
import re
import signal
import socket
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any

from lockstep.distributed.line import EXIT_OTHER_FAILED, Line, ProcessLeft, write
from lockstep.distributed.session import current, leave_run

# What a collective says when its other end is gone: seldom the cause.
_TRANSPORT = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|broken pipe|unavailable"
    "|socket closed|coordination|heartbeat|deadline_exceeded",
    re.IGNORECASE,
)
_NEWS_S = 2.0
_SAVED = 75  # the exit code of `preemption`, which all processes end with


def watch(line: Line) -> None:
    """Tell the others of this process's uncaught exception, of its end, its notices.

    Call it after JAX has connected: handlers at exit run in reverse order, and JAX's
    own must find all processes at their end.
    """
    atexit.register(line.finish)
    line.notices.install()
    _watch_exceptions(line)
    if threading.current_thread() is threading.main_thread():
        _watch_sigterm(line)


def tell_of_exit(code: object) -> None:
    """End all processes where the program of this one was left by `sys.exit(code)`.

    A code that says that nothing failed, or that the run has saved, is none of the
    others' business; they come to their end by themselves.
    """
    session = current()
    if session is None or code in (None, 0, _SAVED):
        return
    line = session.line
    _wait_to_end(line)
    name = f"process {line.index} of {line.count} ({socket.gethostname()})"
    text = f"{name} left its program by sys.exit({code!r})"
    write(f"lockstep: {text}\n")
    line.fail(text)
    leave_run(code if isinstance(code, int) else 1)


def _watch_exceptions(line: Line) -> None:
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> Any:
        _wait_to_end(line)
        name = f"process {line.index} of {line.count} ({socket.gethostname()})"
        print(f"{name} failed:", file=sys.stderr)
        previous(kind, error, trace)
        leave_run(_tell(line, name, kind, error, trace))

    sys.excepthook = hook


def _watch_sigterm(line: Line) -> None:
    """JAX has installed a handler that only takes note; without it SIGTERM ends."""
    own = signal.getsignal(signal.SIGTERM)  # JAX has replaced it without saying so

    def end(number: int, frame: FrameType | None) -> None:
        if line.stopping.is_agreed:
            return  # sent to all, and late here: this one has saved, and is ending
        _wait_to_end(line)
        text = f"process {line.index} of {line.count} was ended by SIGTERM"
        write(f"lockstep: {text}\n")
        line.fail(text)
        leave_run(128 + number)

    signal.signal(signal.SIGTERM, end if own == signal.SIG_DFL else own)
    atexit.register(_ignore_late_sigterm, line)


def _ignore_late_sigterm(line: Line) -> None:
    """At its very end Python drops its handlers, and a SIGTERM may be on its way."""
    if line.stopping.is_agreed:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _wait_to_end(line: Line) -> None:
    """Speak only if no other thread is ending this process; else wait for that."""
    if not line.claim_end():
        threading.Event().wait()


def _tell(
    line: Line,
    name: str,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> int:
    """Make the cause known everywhere; the exit code of this process."""
    if _TRANSPORT.search(str(error)) or isinstance(error, ProcessLeft):
        cause = line.hear_cause(_NEWS_S)
        if cause:
            write(f"lockstep: process {line.index} failed because {cause}\n")
            return EXIT_OTHER_FAILED
    text = "".join(traceback.format_exception(kind, error, trace))
    line.fail(f"{name} failed:\n{text.rstrip()}")
    return 130 if issubclass(kind, KeyboardInterrupt) else 1
