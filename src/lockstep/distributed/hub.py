"""The middle of the star: a thread of process 0 that hears all processes.

It hands round what they exchange, notices at once when one dies, and tells the others
why the run ends. It uses no devices, so it works where they are blocked.
"""

import selectors
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.messages import Messages

MAIN = "main"  # begins the name of the channels that main threads use
SILENT = 0.6  # of heartbeat_s: this long, and it is told
_TICK_S = 0.25
_PATIENCE_S = 30.0  # before the others are told for whom they wait
_ANSWER_S = 3.0  # for the stack of a process that hangs


def silence(name: str, silent_s: float, heartbeat_s: float) -> str:
    """What is said of a process of which nothing was heard for so long."""
    return (
        f"{name} has been silent for {silent_s:.0f} s: it is stopped, or its machine "
        f"or network is down (after heartbeat_s={heartbeat_s:g} the run ends)"
    )


@dataclass
class Member:
    """One process, as the hub knows it.

    Attributes:
        index: its number.
        name: how messages call it.
        line: the connection to it.
        steps: the steps over several processes that it has begun.
        moved: when that number last grew.
        heard: when it last sent anything.
        done: whether it came to the end of its program.
        gone: whether its connection is closed.
    """

    index: int
    name: str
    line: Messages
    steps: int = 0
    moved: float = 0.0
    heard: float = 0.0
    done: bool = False
    gone: bool = False


@dataclass
class _Round:
    """One exchange in the making: the values that have come so far."""

    what: str
    group: tuple[int, ...]
    started: float
    steps: int  # of the first process that came
    values: dict[int, Any] = field(default_factory=dict)
    reminded: float = 0.0


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
        self._heartbeat_s = heartbeat_s
        self._hang_timeout_s = hang_timeout_s
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._left: dict[str, set[int]] = {}
        self._hanging: dict[int, str] = {}
        self._asked_at = self._beaten = 0.0
        self._silent: set[int] = set()
        self._stops, self._passed = False, {}
        self._ended = self._ending = False
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
                    self._look_after(time.monotonic())

    def _hear(self, member: Member, selector: selectors.BaseSelector) -> None:
        try:
            messages = member.line.receive()
        except EOFError:
            selector.unregister(member.line)
            member.line.close()
            member.gone = True
            if not self._ended:
                self._end(
                    f"{member.name} ended without a word: it was killed (out of "
                    "memory?), or crashed in native code",
                    member.index,
                )
            if all(m.gone for m in self._members if m.index):
                self.others_gone.set()
            return
        member.heard = time.monotonic()
        self._silent.discard(member.index)
        for message in messages:
            handler = getattr(self, f"_on_{message['kind']}")
            handler(member, message)

    def _on_value(self, member: Member, message: dict[str, Any]) -> None:
        """One process's part of an exchange; the last part completes it."""
        name = message["channel"], message["number"]
        group = tuple(message["group"])
        current = self._rounds.setdefault(
            name, _Round(message["what"], group, time.monotonic(), message["steps"])
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
        elif len(current.values) == len(group):
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
            self._hanging.clear()

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
        member.done = True
        if all(m.done for m in self._members):
            self._ended = True
            self._tell({"kind": "all done"})

    def _on_failed(self, member: Member, message: dict[str, Any]) -> None:
        self._end(message["text"], member.index)

    def _on_stack(self, member: Member, message: dict[str, Any]) -> None:
        if member.index in self._hanging:
            self._hanging[member.index] = message["text"]

    def _look_after(self, now: float) -> None:
        """What nobody sends: that somebody is late, silent, hangs or left early."""
        self._remind(now)
        self._note_silence(now)
        ended = [m for m in self._members if m.done]
        for member in self._members:
            early = next((m for m in ended if m.steps < member.steps), None)
            if early and not member.done:
                self._end(
                    f"{early.name} came to the end of its program after {early.steps} "
                    f"steps, and {member.name} began step {early.steps + 1}, which all "
                    "must take together",
                    early.index,
                )
                return
        for waiting in self._rounds.values():
            if early := next((m for m in ended if m.index in waiting.group), None):
                if early.index not in waiting.values:
                    self._end(
                        f"{early.name} came to the end of its program, and the others "
                        f"wait for it ({waiting.what})",
                        early.index,
                    )
                    return
        self._look_for_passers_by()
        if self._hang_timeout_s is not None:
            self._look_for_hang(now, self._hang_timeout_s)

    def _look_for_passers_by(self) -> None:
        """A process that went on without an exchange for which the others wait.

        Exchanges of the main threads and steps come in one order on all processes.
        """
        for (channel, _), waiting in self._rounds.items():
            if not channel.startswith(MAIN):
                continue
            first = self._members[next(iter(waiting.values))]
            for index in set(waiting.group) - set(waiting.values):
                member = self._members[index]
                if member.steps > waiting.steps:
                    self._end(
                        f"{first.name} has come to {waiting.what} after step "
                        f"{waiting.steps}, which all must call together, and "
                        f"{member.name} went on to step {member.steps} without it",
                        first.index,
                    )
                    return

    def _remind(self, now: float) -> None:
        for waiting in self._rounds.values():
            since = now - max(waiting.started, waiting.reminded)
            if since > _PATIENCE_S:
                waiting.reminded = now
                missing = sorted(set(waiting.group) - set(waiting.values))
                names = ", ".join(self._members[i].name for i in missing)
                seconds = now - waiting.started
                text = f"waiting for {seconds:.0f} s for {names} ({waiting.what})"
                self._tell({"kind": "note", "text": text}, [0])

    def _note_silence(self, now: float) -> None:
        """JAX ends the run at the heartbeat's limit, and does not say why.

        Whether this process itself is silent is seen by the others' lines.
        """
        if now > self._beaten + SILENT / 4 * self._heartbeat_s:
            self._beaten = now
            self._tell({"kind": "beat"})
        for member in self._members:
            silent_s = now - member.heard
            if (
                silent_s > SILENT * self._heartbeat_s
                and member.index not in self._silent
            ):
                self._silent.add(member.index)
                text = silence(member.name, silent_s, self._heartbeat_s)
                self._tell({"kind": "note", "text": text}, {0} - {member.index})

    def _look_for_hang(self, now: float, limit_s: float) -> None:
        """The slowest process while nobody takes a step: it keeps the others waiting.

        Nobody is watched before its first step, and a process that waits for the
        others at its end does not hang.
        """
        if self._hanging:
            if now > self._asked_at + _ANSWER_S or all(self._hanging.values()):
                self._end_hang(now)
            return
        started = any(m.steps for m in self._members)
        if not started or any(m.done for m in self._members):
            return
        if now - max(m.moved for m in self._members) < limit_s:
            return
        fewest = min(m.steps for m in self._members)
        slow = [m for m in self._members if m.steps == fewest]
        late = self._late()  # the others of `slow` wait for these
        slow = [m for m in slow if m.index in late] or slow
        self._hanging = {m.index: "" for m in slow}
        self._asked_at = now
        self._tell({"kind": "stack"}, self._hanging)

    def _late(self) -> set[int]:
        """Those for whom others wait in an exchange."""
        waiting = self._rounds.values()
        return {i for each in waiting for i in set(each.group) - set(each.values)}

    def _end_hang(self, now: float) -> None:
        parts = []
        for index, stack in self._hanging.items():
            member = self._members[index]
            stack = stack or "it does not answer: stopped, or in native code\n"
            parts.append(
                f"{member.name} has begun no step for {now - member.moved:.0f} s "
                f"(it is at step {member.steps}, others are at "
                f"{max(m.steps for m in self._members)}). It is here:\n{stack}"
            )
        names = ", ".join(self._members[index].name for index in self._hanging)
        self._end(
            "".join(parts) + f"hang_timeout_s={self._hang_timeout_s:g} is over for "
            f"{names}",
            next(iter(self._hanging)),
        )

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
