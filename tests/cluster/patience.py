"""Waiting for what other programs do, with a time limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T], what: str, limit_s: float = 30) -> T:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + limit_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"after {limit_s:g} s not yet: {what}"
        time.sleep(0.05)
    return answer
