"""What the user said about a step, checked and completed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lockstep import placement, sharding
from lockstep.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Options:
    """A function, the mesh it runs on, and how its arguments are treated.

    Attributes:
        fn: the user's function.
        mesh: the caller's mesh.
        device_axis: the axis that the step's collectives name; `None` in the global
            view.
        batch_argnums: the arguments that are split by rows.
        donate_argnums: the arguments whose memory is reused; `None`: find the state.
        remainder: what happens to rows that do not divide.
        mask_name: where a step finds the mask in a padded dict batch.
    """

    fn: Callable[..., Any]
    mesh: Mesh
    device_axis: str | None
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...] | None
    remainder: str
    mask_name: str

    def __post_init__(self) -> None:
        """Check what can be checked before there are arguments."""
        if not callable(self.fn):
            kind = type(self.fn).__name__
            raise TypeError(f"a step is a function; got {kind}: {self.fn!r}")
        if self.remainder not in placement.REMAINDERS:
            raise ValueError(
                f"remainder={self.remainder!r} is not one of {placement.REMAINDERS}"
            )
        if not isinstance(self.mesh, Mesh):
            kind = type(self.mesh).__name__
            raise TypeError(f"a mesh is what make_mesh() returns; got {kind}")
        for name in ("batch_argnums", "donate_argnums"):
            numbers = getattr(self, name) or ()
            if any(not isinstance(i, (int, np.integer)) or i < 0 for i in numbers):
                raise ValueError(
                    f"{name}={numbers}: number the arguments from 0 on (0 the state, "
                    "1 the batch), for a call may have any number of them"
                )
        _ = self.row_axis  # raises when the mesh has no such axis

    @functools.cached_property
    def row_axis(self) -> str:
        """The mesh axis that splits rows: the named one, "data", or the only one."""
        named = self.device_axis in self.mesh.axis_names
        return sharding.row_axis(self.mesh, self.device_axis if named else None)

    @functools.cached_property
    def device_mesh(self) -> Mesh:
        """The mesh under the axis name that the step's collectives use."""
        new = self.device_axis or self.row_axis
        axes = [new if axis == self.row_axis else axis for axis in self.mesh.axis_names]
        return Mesh(self.mesh.devices, axes)

    @property
    def state_argnum(self) -> int | None:
        """Argument 0, unless it is a batch."""
        return None if 0 in self.batch_argnums else 0

    @property
    def is_train_step(self) -> bool:
        """Whether `make_train_step` made it: it then applies masks and folds keys."""
        return isinstance(self.fn, TrainStep)

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What the step wants of the compiler, if anything."""
        return self.fn.compiler_options if isinstance(self.fn, TrainStep) else None

    @functools.cached_property
    def traced(self) -> Callable[..., Any]:
        """The function that is traced: a `TrainStep` may have to know its mesh."""
        return self.fn.on_mesh(self.mesh) if self.is_train_step else self.fn

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the positional parameters, where Python can tell them."""
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except (TypeError, ValueError):
            return ()
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        kinds = (inspect.Parameter.POSITIONAL_ONLY, named)
        return tuple(p.name for p in parameters if p.kind in kinds)

    def name(self, i: int) -> str:
        """How messages call argument `i`: the user's own parameter name."""
        if i < len(self.parameters):
            return self.parameters[i]
        if i == self.state_argnum:
            return "state"
        return "batch" if i in self.batch_argnums else f"argument {i}"


def argnums(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    """One argument number or several, as a tuple."""
    return (numbers,) if isinstance(numbers, (int, np.integer)) else tuple(numbers)
