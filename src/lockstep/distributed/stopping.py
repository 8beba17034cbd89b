"""All processes stop after the same step, whichever of them was asked to.

They are not at the same step when one is asked: the host runs ahead of the devices.
So each says where it is and goes no further than that until the hub has heard all; then
all go on to the step after the furthest. Nobody waits for another's main thread, which
may be inside a collective.
"""

import threading
from collections.abc import Callable
from typing import Any


class Stopping:
    """One process's part of the agreement.

    Places are counted in calls of `reached`, which every process makes after each step.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Messages to the hub go by `send`."""
        self._send = send
        self._changed = threading.Condition()
        self._passed = 0
        self._signal: str | None = None
        self._last: int | None = None
        self._asked = False

    def ask(self, signal: str) -> None:
        """Have all processes stop, for a signal that this one was sent."""
        if not self._asked:
            self._asked = True
            self._send({"kind": "stop", "signal": signal})

    @property
    def is_agreed(self) -> bool:
        """Whether all processes know after which step they stop."""
        return self._last is not None

    def reached(self) -> str | None:
        """The signal for which all stop after this step, or `None` to go on."""
        with self._changed:
            while self._signal is not None and self._last is None:
                self._changed.wait()
            self._passed += 1
            is_over = self._last is not None and self._passed >= self._last
            return self._signal if is_over else None

    def on_stopping(self, message: dict[str, Any]) -> None:
        """The hub asks where this process is."""
        with self._changed:
            self._signal = message["signal"]
            self._send({"kind": "passed", "count": self._passed})

    def on_stop_at(self, message: dict[str, Any]) -> None:
        """The hub has heard all."""
        with self._changed:
            self._last = message["count"]
            self._changed.notify_all()
