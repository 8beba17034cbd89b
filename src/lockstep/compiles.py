"""The log of a step's compiles, each with what changed since the nearest one."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from lockstep.tree import describe_leaf, named_leaves

_log = logging.getLogger("lockstep")


@dataclasses.dataclass(frozen=True)
class Compile:
    """One compile: when the step met these arguments first.

    Attributes:
        reason: "first call", or the leaves that differ from the nearest known call.
        signature: path of every leaf -> its dtype and shape.
        seconds: wall time of the call that compiled, with tracing.
    """

    reason: str
    signature: Mapping[str, str]
    seconds: float | None = None


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
        self.name = name
        self.max_compiles = max_compiles
        self.entries: list[Compile] = []

    @property
    def count(self) -> int:
        """The number of compiles so far."""
        return len(self.entries)

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Note that these named arguments are being compiled, and say why.

        Raises:
            RuntimeError: more than `max_compiles`.
        """
        signature = {
            path: describe_leaf(leaf)
            for name, argument in arguments.items()
            for path, leaf in named_leaves(argument, name)
        }
        reason = self._reason(signature)
        if self.max_compiles is not None and self.count >= self.max_compiles:
            raise RuntimeError(
                f"{self.name} would compile a {self.count + 1}. time, above "
                f"max_compiles={self.max_compiles}: {reason}"
            )
        if self.entries:
            _log.warning("%s: %s: compiling again", self.name, reason)
        self.entries.append(Compile(reason, signature))

    def finish(self, seconds: float) -> None:
        """Note how long the compile took that began last."""
        self.entries[-1] = dataclasses.replace(self.entries[-1], seconds=seconds)

    def _reason(self, new: Mapping[str, str]) -> str:
        if not self.entries:
            return "first call"
        changes = [_changes(entry.signature, new) for entry in self.entries]
        nearest = min(changes, key=len)
        if not nearest:
            return "the same leaves in a tree with other static parts (a new function?)"
        more = f" and {len(nearest) - 3} more" if len(nearest) > 3 else ""
        return ", ".join(nearest[:3]) + more


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    both = [p for p in new if p in old]
    changed = [f"{p} {old[p]} -> {new[p]}" for p in both if old[p] != new[p]]
    added = [f"{p} is new ({new[p]})" for p in new if p not in old]
    gone = [f"{p} is gone" for p in old if p not in new]
    return changed + added + gone
