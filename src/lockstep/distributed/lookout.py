"""What no process tells of itself: that it is late, silent, hangs, or left the others.

The hub has its lookout look several times a second.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.messages import Messages

MAIN = "main"  # begins the name of the channels that main threads use
SILENT = 0.6  # of heartbeat_s: this long, and it is told
_PATIENCE_S = 30.0  # before the others are told for whom they wait
_ANSWER_S = 3.0  # for the stack of a process that hangs


@dataclass
class Member:
    """One process, as the hub knows it.

    Attributes:
        index: its number.
        name: how messages call it.
        line: the connection to it.
        steps: the steps over several processes that it has begun.
        moved: when that number last grew, or it came to its end.
        heard: when it last sent anything.
        done: whether it came to the end of its program.
        gone: whether its connection is closed.
        held: notices that it has not logged yet; see `shared_notices`.
    """

    index: int
    name: str
    line: Messages
    steps: int = 0
    moved: float = 0.0
    heard: float = 0.0
    done: bool = False
    gone: bool = False
    held: list[str] = field(default_factory=list)


@dataclass
class Round:
    """One exchange in the making: the values that have come so far."""

    what: str
    group: tuple[int, ...]
    started: float
    steps: int  # of the first process that came
    values: dict[int, Any] = field(default_factory=dict)
    reminded: float = 0.0

    @property
    def missing(self) -> list[int]:
        """Those for whom the others wait."""
        return sorted(set(self.group) - set(self.values))


Rounds = dict[tuple[str, int], Round]


class Lookout:
    """Watches the members and the rounds of a hub."""

    def __init__(
        self,
        members: list[Member],
        rounds: Rounds,
        heartbeat_s: float,
        hang_timeout_s: float | None,
        *,
        tell: Callable[..., None],
        end: Callable[[str, int], None],
    ) -> None:
        """Messages go to processes by `tell`; `end` ends the run."""
        self._members, self._rounds = members, rounds
        self._heartbeat_s, self._hang_timeout_s = heartbeat_s, hang_timeout_s
        self._tell, self._end = tell, end
        self._hanging: dict[int, str] = {}
        self._asked_at = self._beaten = self._reminded = 0.0
        self._silent: set[int] = set()

    def look(self, now: float) -> None:
        """Tell of what there is to tell; end the run where that is all that helps."""
        self._remind(now)
        self._remind_of_the_slow(now)
        self._note_silence(now)
        for find in (self._early_end, self._passer_by):
            if found := find():
                self._end(*found)
                return
        if self._hang_timeout_s is not None:
            self._look_for_hang(now, self._hang_timeout_s)

    def on_heard(self, member: Member) -> None:
        """A process is not silent."""
        self._silent.discard(member.index)

    def on_step(self) -> None:
        """Nobody hangs, then."""
        self._hanging.clear()

    def on_stack(self, member: Member, stack: str) -> None:
        """A process that seems to hang has said where it is."""
        if member.index in self._hanging:
            self._hanging[member.index] = stack

    def _early_end(self) -> tuple[str, int] | None:
        """A process came to its end, and others need it."""
        ended = [m for m in self._members if m.done]
        for member in self._members:
            early = next((m for m in ended if m.steps < member.steps), None)
            if early and not member.done:
                return (
                    f"{early.name} came to the end of its program after {early.steps} "
                    f"steps, and {member.name} began step {early.steps + 1}, which all "
                    "must take together",
                    early.index,
                )
        for waiting in self._rounds.values():
            if early := next((m for m in ended if m.index in waiting.missing), None):
                return (
                    f"{early.name} came to the end of its program, and the others wait "
                    f"for it ({waiting.what})",
                    early.index,
                )
        return None

    def _passer_by(self) -> tuple[str, int] | None:
        """A process went on without an exchange for which the others wait.

        Exchanges of the main threads, beginnings of passes over data, and steps come in
        one order on all processes.
        """
        for (channel, number), waiting in self._rounds.items():
            in_order = channel.startswith(MAIN)
            if not in_order and number:
                continue  # a thread reads ahead
            first = self._members[next(iter(waiting.values))]
            what = "has come to " + waiting.what if in_order else _BEGUN
            for member in (self._members[index] for index in waiting.missing):
                if member.steps > waiting.steps:
                    return (
                        f"{first.name} {what} after step {waiting.steps}, which all "
                        f"must call together, and {member.name} went on to step "
                        f"{member.steps} without it",
                        first.index,
                    )
        return None

    def _remind(self, now: float) -> None:
        for waiting in self._rounds.values():
            if now - max(waiting.started, waiting.reminded) > _PATIENCE_S:
                waiting.reminded = now
                names = self._names(waiting.missing)
                self._say_late(now - waiting.started, f"{names} ({waiting.what})")

    def _remind_of_the_slow(self, now: float) -> None:
        """Those for whom the others wait in a step, or at the end."""
        moved = max(m.moved for m in self._members)
        if self._rounds or now - max(moved, self._reminded) < _PATIENCE_S:
            return
        most = max(m.steps for m in self._members)
        behind = [m.index for m in self._members if m.steps < most and not m.done]
        running = [m.index for m in self._members if not m.done]
        if behind:
            steps = min(self._members[index].steps for index in behind)
            where = f"at step {steps}, and others have begun step {most}"
        elif len(running) < len(self._members):
            behind, where = running, "still running, and others have come to their end"
        if behind:
            self._reminded = now
            self._say_late(now - moved, f"{self._names(behind)} ({where})")

    def _say_late(self, seconds: float, whom: str) -> None:
        text = f"waiting for {seconds:.0f} s for {whom}"
        self._tell({"kind": "note", "text": text}, [0])

    def _names(self, indices: list[int]) -> str:
        return ", ".join(self._members[index].name for index in indices)

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
        slow = [m.index for m in self._members if m.steps == fewest]
        # Of these some wait for the others in an exchange.
        late = {i for each in self._rounds.values() for i in each.missing}
        self._hanging = dict.fromkeys(late.intersection(slow) or slow, "")
        self._asked_at = now
        self._tell({"kind": "stack"}, self._hanging)

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
        self._end(
            "".join(parts) + f"hang_timeout_s={self._hang_timeout_s:g} is over for "
            f"{self._names(list(self._hanging))}",
            next(iter(self._hanging)),
        )


_BEGUN = "has begun a pass over batches (an evaluation?)"


def silence(name: str, silent_s: float, heartbeat_s: float) -> str:
    """What is said of a process of which nothing was heard for so long."""
    return (
        f"{name} has been silent for {silent_s:.0f} s: it is stopped, or its machine "
        f"or network is down (after heartbeat_s={heartbeat_s:g} the run ends)"
    )
