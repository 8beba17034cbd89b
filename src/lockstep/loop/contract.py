"""What the Trainer asks of a step: which arguments it takes, what it returns."""

import inspect
import re
from typing import Any

from lockstep.data import counts
from lockstep.loop.running import name_of
from lockstep.metrics import is_mean
from lockstep.notices import say_once
from lockstep.tree import first_difference, is_array

_KEY_NAME = re.compile("key|rng")


def key_for(fn: Any, key: Any) -> Any:
    """The base key if the step takes one as its third argument, and else `None`.

    Args:
        fn: the user's step.
        key: the key that the Trainer was given, or `None`.

    Raises:
        TypeError: the step needs a third argument and there is no key, or it needs
            more than three arguments.

    Example:
        >>> key_for(lambda state, batch, key: (state, {}), "a key")
        'a key'
        >>> key_for(lambda state, batch, lr=0.1: (state, {}), None)
    """
    third = _third_argument(fn)
    if third and key is None:
        raise TypeError(
            f"{name_of(fn)} takes a third argument, and no key was given: say "
            "Trainer(key=jax.random.key(0)), and each step gets a key of its own; bind "
            "a third argument that is no key with functools.partial"
        )
    if third is False and key is not None:
        say_once(
            f"Trainer key not used by {name_of(fn)}",
            f"Trainer(key=...) is not used: {name_of(fn)} takes no key",
        )
    return None if third is False else key


def check_output(state: Any, output: Any) -> None:
    """Check that a step returned a state like the one that it got, and metrics.

    Raises:
        TypeError: it did not; names the leaf that differs.

    Example:
        >>> check_output(1.0, (2.0, {"loss": 0.5}))
    """
    if not (isinstance(output, tuple) and len(output) == 2):
        many = isinstance(output, tuple)
        what = f"{len(output)} values" if many else f"one {type(output).__name__}"
        raise TypeError(
            f"the step returned {what}, and a train step returns two, the state and "
            "the metrics: return state, {'loss': loss}. Several states go into one "
            "tuple: return (params, opt_state), {'loss': loss}"
        )
    difference = first_difference(state, output[0], "state")
    if difference is not None:
        raise TypeError(
            f"the step changed the form of its state: {difference}. Return the state "
            "with the structure, shapes and dtypes that it came with"
        )


def by_name(metrics: Any) -> Any:
    """Metrics with names: a bare number is the loss.

    Example:
        >>> by_name({"accuracy": 1.0}), by_name(None)
        ({'accuracy': 1.0}, {})
    """
    if metrics is None:
        return {}
    bare = is_mean(metrics) or is_array(metrics)
    return {"loss": metrics} if bare else metrics


def check_count(name: str, count: Any) -> None:
    """Refuse what is no whole number of at least 1.

    Raises:
        TypeError: not a whole number.
        ValueError: below 1.
    """
    counts.check_count(
        name,
        count,
        too_few=" trains nothing: it must be at least 1",
        whole=f", and a run has a whole number of {name}",
    )


def _third_argument(fn: Any) -> bool | None:
    """Whether a step needs a third argument; `None` if it can take one or not."""
    if hasattr(fn, "takes_key"):  # a TrainStep, whose state may hold the key instead
        return None if fn.takes_key else False
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a callable that does not say
        return None
    places = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    needed = sum(p.default is p.empty for p in places)
    if needed > 3:
        raise TypeError(
            f"{name_of(fn)} needs {needed} arguments, and the Trainer has state, batch "
            "and key for it: bind the others with functools.partial, or put them into "
            "the state"
        )
    if needed == 3:
        return True
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    # A default that is no key, such as lr=0.1, must not be replaced by one.
    return None if len(places) > 2 and _KEY_NAME.search(places[2].name) else False
