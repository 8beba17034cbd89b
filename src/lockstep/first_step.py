"""Somebody may ask to see the first step that a program takes, before it runs.

`lockstep run --rehearse` does: it looks at the step and ends the program there.
"""

from collections.abc import Callable
from typing import Any

# (step, its arguments, its keyword arguments)
Visitor = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_visitors: list[Visitor] = []


def visit_next(visitor: Visitor) -> None:
    """Ask to be called once, before the first call of the next new step."""
    _visitors.append(visitor)


def withdraw(visitor: Visitor) -> None:
    """Wait for a step no longer."""
    if visitor in _visitors:
        _visitors.remove(visitor)


def waiting() -> bool:
    """Whether a visitor still waits for a step."""
    return bool(_visitors)


def present(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Show a step that is about to run to those who wait for one."""
    while _visitors:
        _visitors.pop()(step, args, kwargs)
