"""Somebody may want to see every call of a step: a guard, `lockstep run --watch`.

Each step has a list of its own observers; while it is empty a call costs one look at
it. A step is a `ParallelStep` or what `compat.pmap` returned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import jax
from jax.core import Tracer


class Observer(Protocol):
    """Sees the calls of a step from outside; what it raises ends the call."""

    def before(
        self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> None:
        """A call begins; the arguments are the caller's own, not placed yet."""
        ...

    def after(self, step: Any, outputs: Any, /) -> None:
        """The call was handed to the devices; the next one takes over the state."""
        ...


_everywhere: list[Observer] = []
_looking: list[bool] = []


def for_new_step() -> list[Observer]:
    """The observers of a step that is being made: those who watch all steps."""
    return list(_everywhere)


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Lets one observer see the calls of all steps that are made inside."""
    _everywhere.append(observer)
    try:
        yield
    finally:
        _everywhere.remove(observer)


def observed(
    observers: list[Observer],
    step: Any,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One call of a step, seen by its observers.

    Calls that an observer makes itself are not seen, nor those of a transformation of
    JAX, which have no values.

    Example:
        >>> class Count:
        ...     def before(self, step, args, kwargs):
        ...         print("called with", args)
        ...     def after(self, step, outputs):
        ...         print("returned", outputs)
        >>> observed([Count()], None, lambda args, kwargs: abs(*args), (-1,), {})
        called with (-1,)
        returned 1
        1
    """
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
    if _looking or traced:
        return run(args, kwargs)
    seeing = tuple(observers)  # one of them may leave the list
    with unseen():
        for observer in seeing:
            observer.before(step, args, kwargs)
    outputs = run(args, kwargs)
    with unseen():
        for observer in seeing:
            observer.after(step, outputs)
    return outputs


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, calls of steps are not shown to observers."""
    _looking.append(True)
    try:
        yield
    finally:
        _looking.pop()


def explained(
    step: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of a step; an error for want of memory says what the step needs.

    What does not fit fails in the call that compiles, where its arguments are known.
    """
    known = step.compiles.count
    try:
        outputs = run(args, kwargs)
        if step.compiles.count > known:
            arrays = jax.tree.leaves(outputs)
            jax.block_until_ready([x for x in arrays if not isinstance(x, Tracer)])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            # By name: it lies in a higher layer, and a run that fits never needs it.
            memory = import_module("lockstep.parallel.out_of_memory")
            memory.explain(error, step, args, kwargs)
        raise
    return outputs
