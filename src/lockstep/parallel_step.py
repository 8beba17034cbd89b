"""`ParallelStep`: a step on all devices of a mesh, called like the user's function.

It places what comes from the host, donates the state of train steps, keeps at most
two calls in flight, and puts outputs back on the caller's mesh.
"""

import collections
import inspect
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import first_step, placement, program, sharding
from lockstep.arguments import Placer
from lockstep.compiles import CompileLog
from lockstep.devices import make_mesh
from lockstep.last_call import LastCall
from lockstep.padding import PaddingCheck
from lockstep.replicas import check_replicas
from lockstep.static_leaves import unwrap, wrap
from lockstep.step import TrainStep
from lockstep.views import DeviceView, global_view

MAX_IN_FLIGHT = 2


class ParallelStep:
    """A step on all devices of a mesh; made by `parallelize` and `per_device`.

    Attributes:
        fn: the user's function.
        view: "global" or "device".
        mesh: the caller's mesh, on which all outputs lie.
        axis_name: the mesh axis that splits the rows of a batch.
        batch_argnums: the arguments that are split by rows.
        remainder: what happens to rows that do not divide.
        compiles: the log of compiles.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh | None,
        *,
        device_axis: str | None,
        batch_argnums: int | tuple[int, ...],
        donate_argnums: int | tuple[int, ...] | None,
        remainder: str,
        mask_name: str,
    ) -> None:
        """Check the arguments; nothing is placed or traced yet."""
        if not callable(fn):
            raise TypeError(f"a step is a function; got {type(fn).__name__}: {fn!r}")
        if remainder not in placement.REMAINDERS:
            raise ValueError(
                f"remainder={remainder!r} is not one of {placement.REMAINDERS}"
            )
        self.fn, self.remainder = fn, remainder
        self.mesh = make_mesh() if mesh is None else mesh
        self.view = "global" if device_axis is None else "device"
        self.axis_name = _row_axis(self.mesh, device_axis)
        self.batch_argnums = _as_tuple(batch_argnums)
        self.compiles = CompileLog(getattr(fn, "__name__", type(fn).__name__))
        self._state_argnum = None if 0 in self.batch_argnums else 0
        self._donate = None if donate_argnums is None else _as_tuple(donate_argnums)
        self._device_axis = device_axis
        self._mask_name = None if isinstance(fn, TrainStep) else mask_name
        self._parameters = _parameters(fn)
        self._programs: dict[Any, program.Program] = {}
        self._last_call: LastCall | None = None
        self._strong: dict[Any, dict[int, Any]] = {}
        self._in_flight: collections.deque[Any] = collections.deque()
        self._padding_check = PaddingCheck(self.batch_argnums)
        self._replicas_checked = False
        self._placer = Placer(
            self.mesh,
            self.axis_name,
            remainder=remainder,
            multiple=getattr(fn, "accumulate", 1),
            allow_unsplit=device_axis is None,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; returns as soon as it is dispatched."""
        last = self._last_call
        if last and not kwargs and last.is_like((*args, {}), self._key_shapes(args)):
            return self._finish(last.program, last.program.run(*args, {}))
        first_step.present(self, args, kwargs)
        placed = self._place(args, kwargs)
        if not self._padding_check.done:
            self._padding_check(self._run, placed)
        return self._run(placed)

    def place_state(self, state: Any) -> Any:
        """The state on the mesh: host leaves are copied, placed leaves stay."""
        state = self._placer.state(state, self._name(0))
        if not self._strong:
            return state
        strong = self._strong.get(jax.tree.structure(wrap(state)), {})
        return program.strengthen(state, strong)

    def place_batch(self, batch: Any) -> Any:
        """One batch on the mesh, by the step's `remainder` (`None`: all dropped)."""
        return self._placer.batch(batch)

    @property
    def dropped_rows(self) -> int:
        """Rows left out so far under `remainder="drop"`."""
        return self._placer.dropped_rows

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the step for these arguments, for inspection."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Traced` of the step for these arguments, with its jaxpr."""
        placed = wrap(self._place(args, kwargs))
        shapes = self._key_shapes(placed[:-1])
        return self._program(placed, shapes).run.trace(*placed)

    def on(self, mesh: Mesh, *, compare_replicas: bool = True) -> "ParallelStep":
        """The same function on another mesh; this step donates nothing.

        Args:
            mesh: the other devices.
            compare_replicas: whether the first call compares the replicas of the state.
        """
        step = ParallelStep(
            self.fn,
            mesh,
            device_axis=self._device_axis,
            batch_argnums=self.batch_argnums,
            donate_argnums=(),
            remainder=self.remainder,
            mask_name=self._mask_name or "mask",
        )
        step._replicas_checked = not compare_replicas
        return step

    def wait(self) -> None:
        """Wait until every step that was dispatched has run."""
        while self._in_flight:
            jax.block_until_ready(self._in_flight.popleft())

    def _place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments on the mesh; the last one is the dict of keyword arguments."""
        if kwargs and self._parameters:
            bound = inspect.signature(self.fn).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if self.batch_argnums and max(self.batch_argnums) >= len(args):
            raise TypeError(
                f"the step got {len(args)} positional arguments, and batch_argnums="
                f"{self.batch_argnums} names the batch among them: give the batch, or "
                "set batch_argnums (0 for a function of the batch alone, () for none)"
            )
        return (
            *(self._place_one(i, arg) for i, arg in enumerate(args)),
            kwargs
            and {
                name: self._placer.other(value, name) for name, value in kwargs.items()
            },
        )

    def _place_one(self, i: int, argument: Any) -> Any:
        if i == self._state_argnum:
            return self.place_state(argument)
        if i not in self.batch_argnums:
            return self._placer.other(argument, self._name(i))
        placed = self._placer.batch(argument, self._name(i))
        if placed is None:
            raise ValueError(
                f"{self._name(i)} has {placement.count_rows(argument)} rows, and "
                f"remainder='drop' leaves none on {self.mesh.shape[self.axis_name]} "
                "devices: skip this batch, or use remainder='pad'"
            )
        return placed

    def _run(self, placed: tuple[Any, ...]) -> Any:
        """Run one step on placed arguments, compiling it where they are new."""
        if not self._placer.is_placed(jax.tree.leaves(placed)):
            placed = wrap(placed)  # what is on no device is static
        shapes = self._key_shapes(placed[:-1])
        current = self._program(placed, shapes)
        if current.strong:
            placed = (program.strengthen(placed[0], current.strong), *placed[1:])
        if self._padding_check.done or self.remainder != "pad":
            self._last_call = LastCall.of(placed, current, shapes)
        started, compiled = time.perf_counter(), self.compiles.count
        results = current.run(*placed)
        if self.compiles.count > compiled:
            self.compiles.finish(time.perf_counter() - started)
        return self._finish(current, results)

    def _finish(self, current: program.Program, results: tuple[Any, Any]) -> Any:
        """The user's outputs; bounds the run-ahead and compares replicas once."""
        outputs, token = results
        if current.static_outputs:
            outputs = unwrap(outputs)
        if current.view and current.view.suspects and not self._replicas_checked:
            self._replicas_checked = True
            check_replicas(current.state_of(outputs), name=self._name(0))
        self._bound_run_ahead(current, outputs, token)
        return outputs

    def _program(self, args: tuple[Any, ...], shapes: Any) -> program.Program:
        """The program for this structure of arguments, built when it is new."""
        key = (jax.tree.structure(args), shapes)
        if key not in self._programs:
            self._programs[key] = self._build(args)
        return self._programs[key]

    def _build(self, args: tuple[Any, ...]) -> program.Program:
        names = (*(self._name(i) for i in range(len(args) - 1)), "keywords")
        view = self._device_view(names) if self._device_axis else None
        built = program.build(
            view or global_view(self.fn, self.batch_argnums, self._mask_name),
            args,
            mesh=self.mesh,
            donate_argnums=self._donate,
            state_argnum=self._state_argnum,
            compiles=self.compiles,
            names=names,
        )
        if built.strong:
            self._strong[jax.tree.structure(args[0])] = built.strong
        built.view = view
        return built

    def _device_view(self, names: tuple[str, ...]) -> DeviceView:
        axis = self._device_axis or self.axis_name
        axes = [axis if a == self.axis_name else a for a in self.mesh.axis_names]
        return DeviceView(
            self.fn,
            Mesh(self.mesh.devices, axes),
            axis,
            names=names,
            batch_argnums=self.batch_argnums,
            state_argnum=self._state_argnum,
            mask_name=self._mask_name,
            owns_keys=isinstance(self.fn, TrainStep),
        )

    def _key_shapes(self, args: tuple[Any, ...]) -> Any:
        """First axes that decide how other arguments are split in the device view."""
        special = (self._state_argnum, *self.batch_argnums)
        if self._device_axis is None or len(args) <= len(special):
            return ()
        others = [arg for i, arg in enumerate(args) if i not in special]
        return tuple(np.shape(x)[:1] for x in jax.tree.leaves(others))

    def _bound_run_ahead(
        self, current: program.Program, outputs: Any, token: Any
    ) -> None:
        """Unbounded run-ahead grows memory and aborts simulated devices."""
        if token is None:
            rest = outputs[1:] if current.state_at else outputs
            token = next(x for x in jax.tree.leaves(rest) if isinstance(x, jax.Array))
        self._in_flight.append(token)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():
                jax.block_until_ready(oldest)

    def _name(self, i: int) -> str:
        """How messages call argument `i`: the user's own parameter name."""
        fallback = "batch" if i in self.batch_argnums else f"argument {i}"
        fallback = "state" if i == self._state_argnum else fallback
        return self._parameters[i] if i < len(self._parameters) else fallback


def _row_axis(mesh: Mesh, device_axis: str | None) -> str:
    """The mesh axis that splits rows: the named one, or "data" under another name."""
    if device_axis is not None and device_axis in mesh.axis_names:
        return device_axis
    if "data" in mesh.axis_names:
        return "data"
    if len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    sharding.check_axis(mesh, device_axis or "data")
    raise AssertionError("check_axis raises")


def _as_tuple(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, (int, np.integer)) else tuple(numbers)


def _parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters, where Python can tell them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
