"""How a loss is called: which arguments it takes and in which form it answers."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lockstep import tree
from lockstep.metrics import Mean

_KEY_NAMES = {"key", "rng", "prng", "rng_key", "prng_key", "random_key", "dropout_key"}
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's loss and how to call it.

    Attributes:
        fn: `(params, batch[, key])`, or `(params, model_state, batch[, key])`.
        model_state: whether `fn` takes and returns a model state.
        key: the name of the argument that takes the step's key, if there is one.
        by_keyword: whether the key is passed by that name.
    """

    fn: Callable[..., Any]
    model_state: bool
    key: str | None
    by_keyword: bool

    @classmethod
    def read(cls, fn: Callable[..., Any], model_state: bool = False) -> "Loss":
        """Read from the signature whether the loss takes a key.

        A further argument without a default is the key, and so is one that is named
        like one (`key`, `rng`, ...), by place or by keyword.

        Raises:
            TypeError: not a function, or a signature from which this cannot be seen.

        Example:
            >>> Loss.read(lambda params, batch, rng: 0.0).key
            'rng'
        """
        if not callable(fn):
            raise TypeError(f"the loss is {tree.describe_leaf(fn)}, not a function")
        first = ["params", "model_state", "batch"] if model_state else _PLAIN
        try:
            arguments = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            raise _unclear(first, "its signature cannot be read") from None
        places = [a for a in arguments if a.kind in _BY_PLACE]
        if any(a.kind is a.VAR_POSITIONAL for a in arguments):
            raise _unclear(first, "*args may or may not take a key")
        if len(places) < len(first):
            raise _unclear(first, f"it takes {len(places)} arguments by place")
        others = places[len(first) :]
        others += [a for a in arguments if a.kind is a.KEYWORD_ONLY]
        keys = [a for a in others if a.default is a.empty or a.name in _KEY_NAMES]
        if len(keys) > 1:
            names = " and ".join(repr(a.name) for a in keys)
            raise _unclear(first, f"{names} cannot both be the key")
        if not keys:
            return cls(fn, model_state, None, False)
        key = keys[0]
        by_keyword = key.kind is key.KEYWORD_ONLY or key is not others[0]
        if by_keyword and key.name not in _KEY_NAMES:
            raise _unclear(first, f"{key.name!r} has no value")
        return cls(fn, model_state, key.name, by_keyword)

    def __call__(
        self, params: Any, model_state: Any, batch: Any, key: Any
    ) -> tuple[Any, Mapping[str, Any], Any]:
        """Call the loss.

        Returns:
            The loss's value, its metrics and its model state (`None` without one).

        Raises:
            TypeError: the loss returned another form.
        """
        args = (params, model_state, batch) if self.model_state else (params, batch)
        if self.key is None:
            returned = self.fn(*args)
        elif self.by_keyword:
            returned = self.fn(*args, **{self.key: key})
        else:
            returned = self.fn(*args, key)
        return self._split(returned)

    def _split(self, returned: Any) -> tuple[Any, Mapping[str, Any], Any]:
        state = None
        if self.model_state:
            if not (_is_pair(returned) and _is_pair(returned[1])):
                raise TypeError(
                    "with model_state=True the loss must return loss, (metrics, "
                    f"model_state), and it returned {describe(returned)}"
                )
            value, (metrics, state) = returned
        elif isinstance(returned, tuple):
            if not _is_pair(returned):
                raise TypeError(
                    "the loss must return loss or (loss, metrics), and it returned "
                    f"{describe(returned)}"
                )
            value, metrics = returned
        else:
            value, metrics = returned, {}
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping):
            hint = "" if self.model_state else "; a model state needs model_state=True"
            raise TypeError(
                "the loss's metrics must be a dict of numbers, not "
                f"{describe(metrics)}{hint}"
            )
        return value, metrics, state


_PLAIN = ["params", "batch"]


def describe(value: Any) -> str:
    """What a loss returned, in a few words.

    Example:
        >>> import numpy as np
        >>> describe((np.zeros(3), {"accuracy": 0.5}))
        '(float64[3], dict)'
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, Mean):
        return f"Mean({describe(value.total)}, {describe(value.count)})"
    return tree.describe_leaf(value) if tree.is_array(value) else type(value).__name__


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _unclear(first: list[str], why: str) -> TypeError:
    form = ", ".join(first)
    return TypeError(
        f"the loss must be ({form}) or ({form}, key), and {why}: wrap it, as in "
        f"lambda {form}, key: ..."
    )
