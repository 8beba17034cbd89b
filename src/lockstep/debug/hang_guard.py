"""`hang_guard`: when nothing moves for a while, say which call and which devices."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from lockstep import observers
from lockstep.distributed import processes
from lockstep.tree import named_leaves


@contextmanager
def hang_guard(
    timeout_s: float, *, show: Callable[[str], Any] | None = None
) -> Iterator[None]:
    """Tell where the program stands once no step began or ended for `timeout_s`.

    That is: the step, the number of its call, how long ago it began, which devices
    have not finished it, and the lines of all threads. It is said once a hang, and
    the program goes on. Steps that are made inside are seen, those of `parallelize`,
    `per_device` and `compat.pmap`; `lockstep run --hang-timeout 60` does the same for
    a script.

    Args:
        timeout_s: longer than a step, its compile and what lies between two steps.
        show: what is done with the text; by default it goes to stderr, with the lines
            of all threads.

    Raises:
        ValueError: `timeout_s` is not above 0.

    Example:
        >>> with hang_guard(timeout_s=60):
        ...     step = ls.parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        ...     w, total = step(jnp.zeros(3), np.ones((16, 3), np.float32))
    """
    if not timeout_s > 0:
        raise ValueError(f"hang_guard: timeout_s={timeout_s!r}; it is above 0")
    guard = _HangGuard(timeout_s, show or _to_stderr)
    guard.thread.start()
    try:
        with observers.watching(guard):
            yield
    finally:
        guard.end()


class _HangGuard:
    """An observer of all steps, and a thread that wakes when nothing is observed."""

    def __init__(self, timeout_s: float, show: Callable[[str], Any]) -> None:
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self._timeout_s, self._show = timeout_s, show
        self._moved = threading.Condition()
        self._ended = False
        self._news = 0
        self._calls: dict[str, int] = {}
        self._doing = "no step was called yet"
        self._outputs: Any = ()
        self._since = time.monotonic()

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        name = step.compiles.name
        self._calls[name] = self._calls.get(name, 0) + 1
        self._note(f"{name}, call {self._calls[name]}: not back yet")

    def after(self, step: Any, outputs: Any) -> None:
        """The call was handed to the devices."""
        name = step.compiles.name
        self._outputs = outputs
        self._note(f"{name}, call {self._calls[name]}: handed to the devices")

    def end(self) -> None:
        """Watch no longer."""
        with self._moved:
            self._ended = True
            self._moved.notify()
        self.thread.join()
        self._outputs = ()

    def _note(self, doing: str) -> None:
        with self._moved:
            self._doing, self._since = doing, time.monotonic()
            self._news += 1
            self._moved.notify()

    def _watch(self) -> None:
        told = -1
        with self._moved:
            while not self._ended:
                news = self._news
                moved = self._moved.wait(None if told == news else self._timeout_s)
                if not moved and news == self._news:
                    told = news
                    self._show(self._report())

    def _report(self) -> str:
        seconds = time.monotonic() - self._since
        lines = [f"nothing moved for {seconds:.1f} s ({processes()})", self._doing]
        late = _unfinished(self._outputs)
        if late:
            lines.append(
                f"the call before left {late[0]} unfinished on devices "
                f"{', '.join(map(str, late[1]))}: they wait for other devices or "
                "processes (a collective that not all of them call), or still compute"
            )
        elif self._outputs:
            lines.append("what was handed to the devices before is done")
        return "\n  ".join(lines)


def _unfinished(outputs: Any) -> tuple[str, list[int]] | None:
    """The first output that is not ready, and the devices that owe it."""
    for path, leaf in named_leaves(outputs, "output"):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            shards = leaf.addressable_shards
            late = [s.device.id for s in shards if not s.data.is_ready()]
            if late:
                return path, late
    return None


def _to_stderr(text: str) -> None:
    print("lockstep: " + text, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr)
