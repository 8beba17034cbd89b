"""The log of a step's compiles, each with what changed since the nearest one."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.signatures import Signature

_log = logging.getLogger("lockstep")


@dataclasses.dataclass(frozen=True)
class Compile:
    """One compile: when the step met these arguments first.

    Attributes:
        reason: "first call", or what differs from the nearest known call.
        signature: the types of all leaves, and what is static.
        seconds: wall time of the call that compiled, with tracing.
        planned: whether the user asked for this program, as with `steps_per_call`.
    """

    reason: str
    signature: Signature
    seconds: float | None = None
    planned: bool = False


class CompileLog:
    """All compiles of one step, announced before they stall the run.

    Example:
        >>> log = CompileLog("train_step")
        >>> log.begin({"batch": 1.0}); log.finish(0.5)
        >>> log.count, log.entries[0].reason
        (1, 'first call')
    """

    def __init__(self, name: str, max_compiles: int | None = None) -> None:
        """Start an empty log; above `max_compiles` a further compile raises."""
        if max_compiles is not None and max_compiles < 1:
            raise ValueError(f"max_compiles={max_compiles}: a step compiles once")
        self.name = name
        self.max_compiles = max_compiles
        self.entries: list[Compile] = []
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Programs that are made inside, only to be looked at, are not noted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def count(self) -> int:
        """The number of compiles so far."""
        return len(self.entries)

    def begin(
        self,
        arguments: Mapping[str, Any],
        static: Mapping[str, Any] | None = None,
        *,
        planned: str | None = None,
    ) -> None:
        """Note that these named arguments are being compiled, and say why.

        Args:
            arguments: the arguments; leaves that are no arrays or numbers are static.
            static: further arguments, static as a whole.
            planned: why, where the user asked for one more program: no surprise then,
                and not counted for `max_compiles`.

        Raises:
            RuntimeError: more than `max_compiles`.
        """
        if self._paused:
            return
        signature = Signature.of(arguments, static)
        reason, hint = (planned, "") if planned else self._reason(signature)
        self._note(signature, reason, hint, planned=bool(planned))

    def begin_again(self, reason: str) -> None:
        """Note a compile of known arguments, such as one for another layout of them.

        Raises:
            RuntimeError: more than `max_compiles`.
        """
        if not self._paused and self.entries:
            self._note(self.entries[-1].signature, reason, "", planned=False)

    def _note(
        self, signature: Signature, reason: str, hint: str, *, planned: bool
    ) -> None:
        """Announce a compile before it stalls the run."""
        counted = sum(not entry.planned for entry in self.entries)
        most = math.inf if self.max_compiles is None else self.max_compiles
        if not planned and counted >= most:
            raise RuntimeError(
                f"{self.name} would compile a {_ordinal(counted + 1)} time, above "
                f"max_compiles={self.max_compiles}: {reason}{hint}"
            )
        if self.entries and not planned:
            _log.warning("%s: %s: compiling again%s", self.name, reason, hint)
        self.entries.append(Compile(reason, signature, planned=planned))

    def finish(self, seconds: float) -> None:
        """Note how long the compile took that began last."""
        last = self.entries[-1]
        self.entries[-1] = dataclasses.replace(last, seconds=seconds)
        _log.info("%s compiled in %.1f s: %s", self.name, seconds, last.reason)

    def forget_from(self, count: int) -> None:
        """Forget all but the first `count` compiles: the others came to nothing."""
        del self.entries[count:]

    def __str__(self) -> str:
        """One line a compile: number, seconds, reason."""
        return "\n".join(
            f"{self.name} compile {i}: {_seconds(entry)}{entry.reason}"
            for i, entry in enumerate(self.entries, 1)
        )

    def _reason(self, new: Signature) -> tuple[str, str]:
        """What changed since the nearest known call, and what may be done."""
        if not self.entries:
            return "first call", ""
        known = [(new.changes_from(e.signature), e.signature) for e in self.entries]
        changes, nearest = min(known, key=lambda pair: len(pair[0]))
        if not changes:
            return (
                "the same leaves in other containers, with other static parts, or "
                "inside jit or grad"
            ), ""
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        short = new.lost_rows(nearest) and not new.changes_from(nearest)[3:]
        hint = " (a short batch: remainder='pad' keeps one shape)" if short else ""
        return ", ".join(changes[:3]) + more, hint


def _seconds(entry: Compile) -> str:
    return "" if entry.seconds is None else f"{entry.seconds:.1f} s, "


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
