"""Threads of the backend that give way to those that compute.

Between processes a CPU reduces by gloo, whose one thread for messages wakes whenever
bytes arrive. On its waking it may push the thread that sends off its core, while that
one holds the lock of the connection; then it polls until its time slice is over: 4 ms
for a reduction that takes 0.2. Under SCHED_BATCH a thread that wakes pushes nobody
aside, so the sender lets go of the lock first.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

_THREADS = Path("/proc/self/task")


@contextlib.contextmanager
def backend_that_gives_way() -> Iterator[None]:
    """Start the backend inside; on a CPU under Linux its threads become SCHED_BATCH."""
    before = _threads()
    yield
    if jax.default_backend() == "cpu":
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # it has ended, or the system forbids
                _give_way(thread)


def _threads() -> set[int]:
    """The numbers of this process's threads; empty where the system does not tell."""
    return (
        {int(entry.name) for entry in _THREADS.iterdir()}
        if _THREADS.exists()
        else set()
    )


def _give_way(thread: int) -> None:
    if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # else somebody chose it
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
