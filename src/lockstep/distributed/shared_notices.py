"""What all processes would log is logged by process 0 alone.

The others hold a notice back for a moment: if process 0 logs the same, they need not;
if it does not, the notice is theirs, and they log it. So none is lost. One that a
killed process still held is known to the hub.
"""

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

_HOLD_S = 5.0


class _Held(NamedTuple):
    """A notice that process 0 may have as well.

    Attributes:
        record: what was logged.
        text: its message.
        count: how often this process has had it, this time included.
        until: when process 0 is waited for no longer.
    """

    record: logging.LogRecord
    text: str
    count: int
    until: float


class SharedNotices(logging.Filter):
    """The notices of one process, as a filter of the logger `lockstep`.

    Only a queue is touched where something is logged, which may be a signal handler;
    the thread that listens to the line does the rest.

    Attributes:
        hold_s: for how long a notice is held back.
    """

    def __init__(self, index: int, send: Callable[[dict[str, Any]], None]) -> None:
        """Process `index` tells the hub by `send`."""
        super().__init__()
        self.hold_s = _HOLD_S
        self._is_main = index == 0
        self._send = send
        self._new: queue.SimpleQueue[tuple[logging.LogRecord, str]]
        self._new = queue.SimpleQueue()
        self._own, self._of_main = Counter[str](), Counter[str]()
        self._held: list[_Held] = []
        self._lock = threading.RLock()
        self._ended = False

    def install(self) -> None:
        """From now on they are shared."""
        logging.getLogger("lockstep").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged at once."""
        at_once = self._is_main or self._ended
        if not self._ended:
            self._new.put((record, record.getMessage()))
        return at_once

    def on_said(self, message: dict[str, Any]) -> None:
        """Process 0 has logged this."""
        with self._lock:
            self._of_main[message["text"]] += 1

    def look(self) -> None:
        """Tell the hub of new notices; log those that process 0 does not have."""
        with self._lock:
            before = len(self._held)
            while not self._new.empty():
                self._take(*self._new.get())
            arrived = len(self._held) > before
            held, self._held = self._held, []
            for notice in held:
                if notice.count > self._of_main[notice.text]:
                    if time.monotonic() < notice.until:
                        self._held.append(notice)
                    else:
                        _log(notice)
            if arrived or len(self._held) < before:
                texts = [notice.text for notice in self._held]
                self._send({"kind": "held", "texts": texts})

    def release(self) -> None:
        """Log what is held: this process ends, or process 0 can have no more."""
        with self._lock:
            self.look()
            self._ended = True
            held, self._held = self._held, []
            for notice in held:
                _log(notice)

    def _take(self, record: logging.LogRecord, text: str) -> None:
        if self._is_main:
            self._send({"kind": "said", "text": text})
        else:
            self._own[text] += 1
            until = time.monotonic() + self.hold_s
            self._held.append(_Held(record, text, self._own[text], until))


def _log(notice: _Held) -> None:
    try:
        logging.getLogger("lockstep").callHandlers(notice.record)
    except Exception:  # of a user's handler: the line's thread must live on
        with contextlib.suppress(Exception):  # there may be no stderr either
            traceback.print_exc()
