"""One process's line to the others: values exchanged on the host, and bad news.

Every line ends at the hub in process 0. A process alone has no line.
"""

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from lockstep.distributed.hub import without_a_word
from lockstep.distributed.lookout import SILENT, silence
from lockstep.distributed.messages import Messages
from lockstep.distributed.shared_notices import SharedNotices
from lockstep.distributed.stopping import Stopping

EXIT_OTHER_FAILED = 70
READS_AHEAD = "lockstep-prefetch"  # the name of threads that read batches
_TICK_S = 0.25
_FRAMES = 8  # of the stack of a process that hangs: the innermost ones


class ProcessLeft(RuntimeError):
    """Another process wants nothing more from this exchange."""


class Line:
    """The connection of this process to the hub, and the thread that listens to it.

    Attributes:
        index: the number of this process.
        count: the processes of the run.
        bad_news: set when the hub has told why the run ends.
        stopping: how all processes stop after the same step.
        notices: what is logged by process 0 alone.
    """

    def __init__(
        self,
        messages: Messages,
        index: int,
        count: int,
        leave: Callable[[int], Any],
        heartbeat_s: float = math.inf,
    ) -> None:
        """Start listening.

        Args:
            messages: the connection to the hub.
            index: the number of this process.
            count: the processes of the run.
            leave: ends this process with an exit code, for another's failure.
            heartbeat_s: a hub that is silent for almost so long is told of.
        """
        self.index, self.count = index, count
        self.bad_news = threading.Event()
        self.news = ""
        self.stopping = Stopping(self._send)
        self.notices = SharedNotices(index, self._send)
        self._messages = messages
        self._leave = leave
        self._heartbeat_s = heartbeat_s
        self._heard, self._silent = time.monotonic(), False
        self._changed = threading.Condition()
        self._answers: dict[tuple[str, int], Any] = {}
        self._numbers: dict[str, int] = {}
        self._all_done = threading.Event()
        self._ending_thread = -1
        self._claiming = threading.Lock()
        self._steps = 0
        self._tick_s = _TICK_S * max(1, count / 64)  # the hub hears all of them
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="lockstep-line", daemon=True).start()

    def exchange(
        self,
        channel: str,
        value: Any,
        *,
        what: str,
        group: tuple[int, ...],
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any] | None:
        """Give a value, get those of all processes of the group, in their order.

        All of them must make the same exchanges on a channel in the same order; one
        thread uses a channel. There is no time limit: a process that died or hangs
        ends the run, and for a slow one the wait is reported.

        Args:
            channel: the name of the sequence of exchanges.
            value: anything JSON can hold.
            what: what is waited for, in messages.
            group: the processes that take part.
            cancelled: asked now and then; when true, nothing is waited for.

        Returns:
            The values, or `None` when cancelled.

        Raises:
            ProcessLeft: another process left the channel.
        """
        number = self._numbers.get(channel, 0)
        self._numbers[channel] = number + 1
        message = {"kind": "value", "channel": channel, "number": number}
        message |= {"value": value, "what": what, "group": group}
        self._send(message | {"steps": self._steps})
        with self._changed:
            while (channel, number) not in self._answers:
                if cancelled and cancelled():
                    return None
                self._changed.wait(_TICK_S if cancelled else None)
            answer = self._answers.pop((channel, number))
        if isinstance(answer, int):
            raise ProcessLeft(
                f"process {answer} has left its loop, and process {self.index} goes on "
                f"({what})"
            )
        return answer

    def leave(self, channel: str, group: tuple[int, ...]) -> None:
        """Say that this process makes no more exchanges on a channel."""
        self._numbers.pop(channel, None)
        self._send({"kind": "leave", "channel": channel, "group": group})

    def begin_steps(self, count: int) -> None:
        """Count steps that all processes take together; sent now and then."""
        self._steps += count

    def claim_end(self) -> bool:
        """Whether the calling thread is the one that ends this process.

        If so, nothing is held back any more: the cause will be the last that it says.
        """
        own = threading.get_ident()
        with self._claiming:
            is_first = self._ending_thread == -1
            if is_first:
                self._ending_thread = own
        if is_first:
            patiently(self.notices.release)
        return self._ending_thread == own

    def fail(self, text: str) -> None:
        """Tell the others that this process ends, and why; returns when they know."""
        self._send({"kind": "failed", "text": text})
        self.bad_news.wait(2)

    def hear_cause(self, wait_s: float) -> str:
        """The reason for which the run ends, if another process has given one."""
        self.bad_news.wait(wait_s)
        return self.news

    def finish(self) -> None:
        """Wait until every process has come to its end."""
        self.notices.look()
        self._send({"kind": "done", "steps": self._steps})
        self._all_done.wait()
        self.notices.release()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._messages.send(message)
        except OSError:
            pass  # the listening thread sees the end of the line, and says so

    def _listen(self) -> None:
        while True:
            try:
                messages = self._messages.receive(self._tick_s)
            except EOFError:
                self._messages.close()
                if not self._all_done.is_set():
                    self._on_end({"text": without_a_word("process 0"), "culprit": 0})
                return
            for message in messages:
                handler = getattr(self, f"_on_{message['kind'].replace(' ', '_')}")
                handler(message)
            self._note_silence(bool(messages))
            self.notices.look()
            self._send({"kind": "steps", "steps": self._steps})

    def _note_silence(self, heard: bool) -> None:
        """Say it before JAX ends the run for a hub that is gone, and names nobody."""
        now = time.monotonic()
        if heard or self._all_done.is_set():  # after that the hub need not be there
            self._heard, self._silent = now, False
        elif now - self._heard > SILENT * self._heartbeat_s and not self._silent:
            self._silent = True
            text = silence("process 0", now - self._heard, self._heartbeat_s)
            write(f"lockstep: {text}\n")

    def _on_beat(self, message: dict[str, Any]) -> None:
        """The hub is there."""

    def _on_values(self, message: dict[str, Any]) -> None:
        self._answer(message, message["values"])

    def _on_left(self, message: dict[str, Any]) -> None:
        self._answer(message, message["by"])

    def _answer(self, message: dict[str, Any], answer: Any) -> None:
        channel, number = message["of"]
        with self._changed:
            self._answers[channel, number] = answer
            self._changed.notify_all()

    def _on_note(self, message: dict[str, Any]) -> None:
        write(f"lockstep: {message['text']}\n")

    def _on_said(self, message: dict[str, Any]) -> None:
        self.notices.on_said(message)

    def _on_stopping(self, message: dict[str, Any]) -> None:
        self.stopping.on_stopping(message)

    def _on_stop_at(self, message: dict[str, Any]) -> None:
        self.stopping.on_stop_at(message)

    def _on_all_done(self, message: dict[str, Any]) -> None:
        self._all_done.set()

    def _on_stack(self, message: dict[str, Any]) -> None:
        self._send({"kind": "stack", "text": _stacks()})

    def _on_end(self, message: dict[str, Any]) -> None:
        """Another process failed: say so, and end where no exit handler can wait."""
        if self.bad_news.is_set():
            return
        self.news = message["text"]
        self.bad_news.set()
        if not self.claim_end():
            return  # the thread that failed reads the news, and speaks last
        write(f"lockstep: process {self.index} ends, for {self.news}\n")
        self._leave(EXIT_OTHER_FAILED)


def _stacks() -> str:
    """Where the main thread is, and those that read batches ahead of it."""
    frames, text = sys._current_frames(), ""
    for thread in (threading.main_thread(), *threading.enumerate()):
        reads = thread.name == READS_AHEAD
        if (reads or not text) and (frame := frames.get(thread.ident or 0)):
            text += "and the thread that reads batches is here:\n" if reads else ""
            text += "".join(traceback.format_stack(frame)[-_FRAMES:])
    return text


def write(text: str) -> None:
    """To standard error, whole and at once, whatever the main thread holds."""
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass


def leave(code: int) -> None:
    """End this process now; handlers at exit would wait for processes that are gone."""
    patiently(_flush)
    os._exit(code)


def patiently(act: Callable[[], Any]) -> None:
    """Do what writes to a stream; the main thread may hold its lock for ever."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(0.5)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
