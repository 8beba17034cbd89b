"""The middle of the star: a thread of process 0 that hears all processes.

It hands round what they exchange, notices at once when one dies, and tells the others
why the run ends. It uses no devices, so it works where they are blocked.
"""

import selectors
import threading
import time
from typing import Any

from lockstep.distributed.lookout import Lookout, Member, Round, Rounds

_TICK_S = 0.25


class Hub:
    """Serves the lines of all processes, that of process 0 included.

    Attributes:
        others_gone: set when every other process has closed its connection.
    """

    def __init__(
        self,
        members: list[Member],
        heartbeat_s: float,
        hang_timeout_s: float | None,
    ) -> None:
        """Start the thread."""
        self.others_gone = threading.Event()
        self._members = members
        self._rounds: Rounds = {}
        self._left: dict[str, set[int]] = {}
        self._stops, self._passed = False, {}
        self._ended = self._ending = False
        self._lookout = Lookout(
            members,
            self._rounds,
            heartbeat_s,
            hang_timeout_s,
            tell=self._tell,
            end=self._end,
        )
        now = time.monotonic()
        for member in members:
            member.moved = member.heard = now
        threading.Thread(target=self._serve, name="lockstep-hub", daemon=True).start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.line, selectors.EVENT_READ, member)
            while not self.others_gone.is_set():
                for key, _ in selector.select(_TICK_S):
                    self._hear(key.data, selector)
                if not self._ending:
                    self._lookout.look(time.monotonic())

    def _hear(self, member: Member, selector: selectors.BaseSelector) -> None:
        try:
            messages = member.line.receive()
        except EOFError:
            selector.unregister(member.line)
            member.line.close()
            member.gone = True
            if not self._ended:
                for text in member.held:
                    note = f"{member.name} had also to say: {text}"
                    self._tell({"kind": "note", "text": note}, [0])
                self._end(without_a_word(member.name), member.index)
            if all(m.gone for m in self._members if m.index):
                self.others_gone.set()
            return
        member.heard = time.monotonic()
        self._lookout.on_heard(member)
        for message in messages:
            handler = getattr(self, f"_on_{message['kind']}")
            handler(member, message)

    def _on_value(self, member: Member, message: dict[str, Any]) -> None:
        """One process's part of an exchange; the last part completes it."""
        name = message["channel"], message["number"]
        group = tuple(message["group"])
        current = self._rounds.setdefault(
            name, Round(message["what"], group, time.monotonic(), message["steps"])
        )
        if message["what"] != current.what:
            known = self._members[next(iter(current.values))]
            self._end(
                f"the processes run different programs: {member.name} has come to "
                f"{message['what']}, and {known.name} to {current.what}",
                member.index,
            )
            return
        current.values[member.index] = message["value"]
        if gone := self._left.get(name[0], set()) & set(group):
            self._drop(name, sorted(gone))
        elif not current.missing:
            del self._rounds[name]
            values = [current.values[i] for i in group]
            self._tell({"kind": "values", "of": list(name), "values": values}, group)

    def _on_leave(self, member: Member, message: dict[str, Any]) -> None:
        """A process wants nothing more from a channel, so no round can complete."""
        channel = message["channel"]
        left = self._left.setdefault(channel, set())
        left.add(member.index)
        for name in [name for name in self._rounds if name[0] == channel]:
            self._drop(name, sorted(left))
        if left >= set(message["group"]):
            del self._left[channel]

    def _drop(self, name: tuple[str, int], left: list[int]) -> None:
        waiting = set(self._rounds.pop(name).values) - set(left)
        self._tell({"kind": "left", "of": list(name), "by": left[0]}, waiting)

    def _on_steps(self, member: Member, message: dict[str, Any]) -> None:
        if message["steps"] > member.steps:
            member.steps, member.moved = message["steps"], member.heard
            self._lookout.on_step()

    def _on_stop(self, member: Member, message: dict[str, Any]) -> None:
        """A process was asked to stop; see `stopping`."""
        if not self._stops:
            self._stops = True
            self._tell({"kind": "stopping", "signal": message["signal"]})

    def _on_passed(self, member: Member, message: dict[str, Any]) -> None:
        self._passed[member.index] = message["count"]
        if len(self._passed) == len(self._members):
            last = max(self._passed.values()) + 1
            self._tell({"kind": "stop at", "count": last})

    def _on_done(self, member: Member, message: dict[str, Any]) -> None:
        self._on_steps(member, message)
        member.done, member.moved = True, member.heard
        if all(m.done for m in self._members):
            self._ended = True
            self._tell({"kind": "all done"})

    def _on_said(self, member: Member, message: dict[str, Any]) -> None:
        """Process 0 has logged a notice; see `shared_notices`."""
        self._tell(message, range(1, len(self._members)))

    def _on_held(self, member: Member, message: dict[str, Any]) -> None:
        member.held = message["texts"]

    def _on_failed(self, member: Member, message: dict[str, Any]) -> None:
        self._end(message["text"], member.index)

    def _on_stack(self, member: Member, message: dict[str, Any]) -> None:
        self._lookout.on_stack(member, message["text"])

    def _end(self, text: str, culprit: int) -> None:
        """Tell everybody, once, why the run ends."""
        if not self._ending:
            self._ending = self._ended = True
            self._tell({"kind": "end", "text": text, "culprit": culprit})

    def _tell(self, message: dict[str, Any], whom: Any = None) -> None:
        for index in range(len(self._members)) if whom is None else sorted(whom):
            member = self._members[index]
            try:
                member.line.send(message)
            except OSError:
                pass  # it is gone; its end of the line says so in a moment


def without_a_word(name: str) -> str:
    """What is said of a process whose connection closed, and nothing else came."""
    return (
        f"{name} ended without a word: it was killed (out of memory?), crashed in "
        "native code, or called os._exit"
    )
