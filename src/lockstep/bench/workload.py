"""What is timed: a loss, an optimizer, parameters and a batch, made by the user."""

import dataclasses
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lockstep.bench.failures import in_one_line
from lockstep.step.loss import Loss

FORM = (
    "return (loss, optimizer, params, batch), a lockstep.bench.workload.Workload, or "
    "(step, state, batch) for a step of your own"
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training to be timed.

    Attributes:
        loss: in any form that `make_train_step` takes, with a model state if
            `model_state` is given. Device-view contenders call `device_loss` if there
            is one.
        optimizer: an optax optimizer.
        params: the parameters.
        batch: a global batch of NumPy arrays, `[B, ...]`.
        model_state: what the loss carries on, such as BatchNorm's statistics.
        device_loss: the same loss for one shard, with the axis "data" bound.
    """

    loss: Callable[..., Any]
    optimizer: Any
    params: Any
    batch: Any
    model_state: Any = None
    device_loss: Callable[..., Any] | None = None

    @property
    def key(self) -> jax.Array | None:
        """A first key, if the loss draws."""
        takes_key = Loss.read(self.loss, self.model_state is not None).key is not None
        return jax.random.key(0) if takes_key else None


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step that the user wrote or made: `(state, batch) -> (state, metrics)`.

    Attributes:
        step: a plain function for the global view, a `TrainStep`, or what `parallelize`
            or `per_device` returned.
        state: its first state.
        batch: a global batch of NumPy arrays, `[B, ...]`.
    """

    step: Callable[..., Any]
    state: Any
    batch: Any


def load(where: str) -> Workload | OwnStep:
    """Call the maker at `file.py:name` or `module:name`.

    Raises:
        ValueError: no such place, an error in the user's code (with its line), or what
            the maker returned has no known form.
    """
    source, _, name = where.rpartition(":")
    if not source:
        raise ValueError(f"{where!r} names no function: write it as my_step.py:make")
    if source.endswith(".py") and not Path(source).is_file():
        raise ValueError(f"there is no file {source}")
    try:
        namespace = _names_in(source)
    except Exception as error:
        raise ValueError(f"{source} failed: {in_one_line(error)}") from error
    if name not in namespace:
        raise ValueError(f"there is no {name!r} in {source}")
    check_maker(namespace[name], where)
    try:
        made = namespace[name]()
    except Exception as error:
        raise ValueError(f"{where} failed: {in_one_line(error)}") from error
    return read(made)


def check_maker(maker: Any, where: str) -> None:
    """Refuse what cannot be called without arguments.

    Raises:
        ValueError: not a function, or one that needs arguments.

    Example:
        >>> check_maker(lambda rows=8: None, "my_step.py:make")
    """
    if not callable(maker):
        raise ValueError(
            f"{where} is of type {type(maker).__name__}, and not a function"
        )
    try:
        inspect.signature(maker).bind()
    except ValueError:  # a callable that does not say
        return
    except TypeError as error:
        raise ValueError(
            f"{where} is called without arguments: {error}; give them defaults"
        ) from None


def read(made: Any) -> Workload | OwnStep:
    """What a maker returned, in one of the known forms.

    Example:
        >>> read((len, 0, [1])).batch
        [1]
    """
    if isinstance(made, Workload | OwnStep):
        return made
    if isinstance(made, tuple) and len(made) == 4:
        if not callable(made[0]) or not hasattr(made[1], "init"):
            raise ValueError(
                f"the maker returned a {type(made[0]).__name__} as the loss and a "
                f"{type(made[1]).__name__} as the optimizer: {FORM}"
            )
        return Workload(*made)
    if isinstance(made, tuple) and len(made) == 3:
        return OwnStep(*made)
    what = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
    raise ValueError(f"the maker returned {what}: {FORM}")


def row_count(work: Workload | OwnStep) -> int:
    """The rows of the global batch."""
    return len(next(x for x in jax.tree.leaves(work.batch) if getattr(x, "ndim", 0)))


def _names_in(source: str) -> dict[str, Any]:
    if source.endswith(".py"):
        path = Path(source).resolve()
        sys.path.insert(0, str(path.parent))
        return runpy.run_path(str(path))
    return vars(importlib.import_module(source))
