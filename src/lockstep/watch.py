"""`lockstep run --watch`: a script runs, and its steps are looked at from outside.

For scripts that only use `parallelize`, `per_device` or `compat.pmap`: nothing in them
has to be changed.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep import observers
from lockstep.transfers import transfers

# So many steps lie between two looks for NaN; a step back in time costs a copy.
_NAN_EVERY = 20


@contextmanager
def watched(every: int) -> Iterator[None]:
    """Prints what a person needs to know of the steps that the program inside takes.

    That is, of each step: its collectives and its memory, before its first call; every
    compile, with the reason; what comes from the host in every call; copies of the
    state that differ; the first step that is not finite, with rows and line; a summary
    at the end.

    Args:
        every: the copies are compared every so many calls.
    """
    from lockstep.debug import FirstCall, collectives, memory

    watch = _Watch(every)
    with (
        observers.watching(FirstCall(collectives, memory, show=_say)),
        observers.watching(watch),
    ):
        try:
            yield
        finally:
            watch.finish()


@dataclasses.dataclass
class _Seen:
    """What was seen of one step."""

    step: Any
    guard: Any
    calls: int = 0
    compiles: int = 0
    checks: int = 0
    diverged: bool = False
    bad: list[Any] = dataclasses.field(default_factory=list)


class _Watch:
    """An observer of all steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps: dict[int, _Seen] = {}
        self._args: tuple[Any, ...] = ()

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        seen = self._steps.get(id(step)) or self._begin(step)
        if seen.calls == 1:
            for text in transfers(step, args, kwargs)[:3]:
                _say(f"{step.compiles.name}, call 2: {text}")
        seen.guard.before(step, args, kwargs)
        self._args = args

    def after(self, step: Any, outputs: Any) -> None:
        """Tell of new compiles, bad numbers and, now and then, of other copies."""
        seen, args, self._args = self._steps[id(step)], self._args, ()
        seen.calls += 1
        for entry in step.compiles.entries[seen.compiles :]:
            seconds = "" if entry.seconds is None else f" in {entry.seconds:.1f} s"
            name = step.compiles.name
            _say(f"{name}, call {seen.calls}: compiled{seconds}: {entry.reason}")
        seen.compiles = step.compiles.count
        seen.guard.after(step, outputs)
        if seen.calls % self._every == 0 and not seen.diverged:
            self._compare(seen, args, outputs)

    def finish(self) -> None:
        """Look at the last steps, and sum up."""
        for seen in self._steps.values():
            seen.guard.finish()
            log = seen.step.compiles
            seconds = sum(entry.seconds or 0.0 for entry in log.entries)
            copies = "differ" if seen.diverged else f"equal in {seen.checks} checks"
            numbers = "NOT FINITE" if seen.bad else "finite"
            _say(
                f"{log.name}: {seen.calls} calls, compiled {log.count} x in "
                f"{seconds:.1f} s, numbers {numbers}, copies of the state {copies}"
            )

    def _begin(self, step: Any) -> _Seen:
        from lockstep.debug.nonfinite.guard import Guard

        def found(report: Any) -> None:
            seen.bad.append(report)
            _say(str(report))

        seen = _Seen(step, Guard(step, "run", _NAN_EVERY, found))
        self._steps[id(step)] = seen
        return seen

    def _compare(self, seen: _Seen, args: tuple[Any, ...], outputs: Any) -> None:
        from lockstep.debug.nonfinite.alone import new_state
        from lockstep.parallel import ParallelStep
        from lockstep.replicas import ReplicaMismatch, check_replicas

        state = new_state(args, outputs)
        if state is None:
            return
        stacked = not isinstance(seen.step, ParallelStep)
        seen.checks += 1
        try:
            check_replicas(state, stacked=stacked)
        except ReplicaMismatch as error:
            seen.diverged = True
            _say(f"{seen.step.compiles.name}, call {seen.calls}: {error}")


def _say(text: str) -> None:
    """On the main process; a report of several lines is indented."""
    from lockstep.distributed import is_main_process

    if is_main_process():
        print("lockstep watch: " + text.replace("\n", "\n  "), flush=True)
