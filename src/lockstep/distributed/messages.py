"""JSON, one message a line, over the connections between processes."""

import json
import select
import socket
from typing import Any

_LONGEST = 64 * 1024 * 1024  # bytes: what comes without an end is none of ours


class Messages:
    """One end of a connection: whole messages in and out.

    Any thread may send; one thread receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        """The connection is this object's from now on."""
        self.socket = connection
        self._start = b""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        """For `select`."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The messages that are complete by now; waits for bytes, but not longer.

        Raises:
            EOFError: the other end closed the connection, or sends no messages.
        """
        if timeout_s is not None and not self._readable(timeout_s):
            return []
        try:
            block = self.socket.recv(1 << 16)
        except OSError:  # reset: the process died
            block = b""
        *lines, self._start = (self._start + block).split(b"\n")
        if not block or len(self._start) > _LONGEST:
            raise EOFError
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise EOFError from None

    def _readable(self, timeout_s: float) -> bool:
        if self.socket.fileno() < 0:  # closed on this side
            raise EOFError
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(1000 * timeout_s))

    def close(self) -> None:
        """Close; the other end sees it at once."""
        self.socket.close()
