"""`ParallelStep`: a step on all devices of a mesh, called like the user's function.

It places what comes from the host, donates the state of train steps, keeps at most
two calls in flight, and puts outputs back on the caller's mesh.
"""

import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep import first_step, observers, packing, placement
from lockstep.compiles import CompileLog
from lockstep.parallel import making, out_of_memory, program, real_rows, several
from lockstep.parallel.across import Across
from lockstep.parallel.arguments import Placer
from lockstep.parallel.carried import Carrier
from lockstep.parallel.independence import RowsCheck
from lockstep.parallel.last_call import LastCall
from lockstep.parallel.options import Options
from lockstep.parallel.padding import PaddingCheck
from lockstep.parallel.run_ahead import RunAhead
from lockstep.parallel.scalars import Scalars
from lockstep.parallel.static_leaves import unwrap, wrap
from lockstep.parallel.views import DeviceView, global_view
from lockstep.replicas import check_replicas


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
        observers: those who see every call.
    """

    def __init__(
        self,
        options: Options,
        *,
        compare_replicas: bool = True,
        max_compiles: int | None = None,
    ) -> None:
        """Nothing is placed or traced yet."""
        self.fn, self.mesh = options.fn, options.mesh
        self.view = "global" if options.device_axis is None else "device"
        self.axis_name = options.row_axis
        self.batch_argnums = options.batch_argnums
        self.remainder = options.remainder
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        self.compiles = CompileLog(name, max_compiles)
        self.observers = observers.for_new_step()
        self._options = options
        self._together = several.Together(self.compiles)
        self._programs: dict[Any, program.Program] = {}
        self._strong: dict[Any, dict[int, Any]] = {}
        self._last_call: LastCall | None = None
        self._run_ahead = RunAhead()
        self._compare_replicas = compare_replicas
        devices, parts, microbatches = self.mesh.shape[self.axis_name], 1, 1
        if options.is_train_step:
            parts, microbatches = self.fn.parts_on_each(devices), self.fn.accumulate
        shards = devices * parts // microbatches if self.view == "device" else 1
        self._padding_check = PaddingCheck(
            self.batch_argnums, shards=shards, microbatches=microbatches
        )
        self._carrier = Carrier(options)
        self._across = Across(self.mesh)
        self._rows_check = RowsCheck(options)
        self._scalars = Scalars()
        self._placer = Placer(
            self.mesh,
            self.axis_name,
            remainder=self.remainder,
            multiple=parts,
            allow_unsplit=self.view == "global",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; returns as soon as it is dispatched."""
        try:
            if self.observers:
                call = observers.observed
                return call(self.observers, self, self._call, args, kwargs)
            return self._call(args, kwargs)
        except jax.errors.JaxRuntimeError as error:
            out_of_memory.explain(error, self, args, kwargs)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last, seen = self._last_call, (*self._carrier.seen(args), {})
        if last and not kwargs and last.is_like(seen, self._key_shapes(args)):
            if self._across.knows(seen):
                self._across.begin()
                return self._finish(last.program, last.program.run(*seen))
        first_step.present(self, args, kwargs)
        placed = self._place(args, kwargs)
        if self._padding_check.concerns(placed):
            self._padding_check(
                self._run, placed, lambda padded: real_rows.off(self, placed, padded)
            )
        return self._run(placed)

    def several(
        self, state: Any, calls: Sequence[tuple[Any, ...]]
    ) -> tuple[Any, list[Any]]:
        """Run several train steps, in one dispatch where all have the form of the last.

        Args:
            state: as for one step.
            calls: for each step its arguments after the state.

        Returns:
            The state after the last step, and what each step returned beside it.
        """
        if len(calls) > 1 and not self.observers:
            (state,) = self._carrier.carry((self.place_state(state),))
            placed = tuple(
                (*(self._place_one(i, arg) for i, arg in enumerate(call, 1)), {})
                for call in calls
            )
            ready = self._ready_for(state, placed)
            if ready:
                return self._dispatch(ready, state, placed)
            calls = [call[:-1] for call in placed]
        rest = []
        for call in calls:
            state, *outputs = self(state, *call)
            rest.append(_single(outputs))
        return state, rest

    def _ready_for(self, state: Any, calls: tuple[Any, ...]) -> program.Program | None:
        """The program that ran for one such call, if nothing about these is new."""
        first = (state, *calls[0])
        if not self._rows_check.done:  # a program may be there, and have been refused
            return None
        if not self._placer.is_placed(jax.tree.leaves((state, calls))):
            return None
        if any(self._padding_check.concerns((state, *call)) for call in calls):
            return None
        key = (jax.tree.structure(first), self._key_shapes(first[:-1]))
        known = self._programs.get(key)
        suits = known and known.state_at == "first" and not known.static_outputs
        return known if suits and several.alike(calls) else None

    def _dispatch(
        self, current: program.Program, state: Any, calls: tuple[Any, ...]
    ) -> tuple[Any, list[Any]]:
        """Run several steps as one program."""
        self._across.begin(len(calls))
        names = self._names((state, *calls[0]))
        state, results = self._together(current, state, calls, names)
        rest, token = results[-1]
        self._run_ahead.add(current.readable((state, rest)) if token is None else token)
        return self._carrier.show_state(state), [_single(rest) for rest, _ in results]

    def place_state(self, state: Any) -> Any:
        """The state on the mesh: host leaves are copied, placed leaves stay."""
        carried = self._carrier.known(state)
        if carried is not None:
            placed = self._placer.state(carried, self._options.name(0))
            return state if placed is carried else self._carrier.show_state(placed)
        state = self._placer.state(self._carrier.lay_out(state), self._options.name(0))
        if not self._strong:
            return state
        strong = self._strong.get(jax.tree.structure(wrap(state)), {})
        return program.strengthen(state, strong)

    def make_state(self, make: Callable[..., Any], *args: Any) -> Any:
        """`make(*args)`, run on the devices, straight into the layout of the state.

        Nothing lies whole on the host or on device 0 first, and what
        `optimizer_sharding` splits is never whole anywhere. In several processes all
        must make the same. Example: `step.make_state(init, jax.random.key(0))`.
        """
        return making.make_state(make, args, self)

    def place_batch(self, batch: Any, **agreed: Any) -> Any:
        """One batch on the mesh (`None`: all dropped); see `Placer.batch`."""
        return self._placer.batch(batch, **agreed)

    def pad_to(self, rows: int) -> None:
        """Under `remainder="pad"`, give every batch so many rows or more."""
        self._placer.pad_to(rows)

    @property
    def layout(self) -> placement.Layout:
        """Where the rows of a batch go."""
        return self._placer.layout

    @property
    def state_at(self) -> str | None:
        """Where the outputs of the last call hold the new state; see `Program`."""
        return None if self._last_call is None else self._last_call.program.state_at

    def lay_out(self, state: Any) -> Any:
        """A state, placed or not or only described, split as the step wants it."""
        return self._carrier.lay_out(state)

    @property
    def dropped_rows(self) -> int:
        """Rows left out so far under `remainder="drop"`."""
        return self._placer.dropped_rows

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the step for these arguments, for inspection."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Traced` of the step for these arguments, with its jaxpr.

        `jax.ShapeDtypeStruct`s with a sharding stand for arrays that lie there; with
        them nothing is placed.
        """
        placed = self.taken(*args, **kwargs)
        return self._program(placed, self._key_shapes(placed[:-1])).run.trace(*placed)

    def taken(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What the compiled program takes for these arguments: its leaves, in order."""
        described = any(map(_is_description, jax.tree.leaves(args)))
        placed = (*args, kwargs) if described else self._place(args, kwargs)
        placed = wrap(
            self._carrier.carry((self._carrier.lay_out(placed[0]), *placed[1:]))
        )
        current = self._program(placed, self._key_shapes(placed[:-1]))
        if current.strong:
            placed = (program.strengthen(placed[0], current.strong), *placed[1:])
        return placed

    def dependent_rows(self, *args: Any, **kwargs: Any) -> list[str]:
        """How the rows of one device meet in the loss of a train step, in words."""
        return self._rows_check.findings(self._place(args, kwargs))

    def on(self, mesh: Mesh, *, compare_replicas: bool = True) -> "ParallelStep":
        """The same function on another mesh; it donates nothing and checks no rows.

        Args:
            mesh: the other devices.
            compare_replicas: whether the first call compares the replicas of the state.
        """
        options = dataclasses.replace(self._options, mesh=mesh, donate_argnums=())
        step = ParallelStep(options, compare_replicas=compare_replicas)
        step.observers.clear()  # it is there to be looked at, whatever it does
        step._padding_check.done = step._rows_check.done = True
        return step

    def copy(self, fn: Callable[..., Any] | None = None) -> "ParallelStep":
        """The same step with a log of its own, to look at; or `fn` in its place."""
        return ParallelStep(dataclasses.replace(self._options, fn=fn or self.fn))

    def wait(self) -> None:
        """Wait until every step that was dispatched has run."""
        self._run_ahead.wait()

    def _place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments on the mesh; the last one is the dict of keyword arguments."""
        if kwargs and self._options.parameters:
            bound = inspect.signature(self.fn).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if self.batch_argnums and max(self.batch_argnums) >= len(args):
            raise TypeError(
                f"the step got {len(args)} positional arguments, and batch_argnums="
                f"{self.batch_argnums} names the batch among them: give the batch, or "
                "set batch_argnums (0 for a function of the batch alone, () for none)"
            )
        keywords = {name: self._other(value, name) for name, value in kwargs.items()}
        return (*(self._place_one(i, arg) for i, arg in enumerate(args)), keywords)

    def _place_one(self, i: int, argument: Any) -> Any:
        name = self._options.name(i)
        if i == self._options.state_argnum:
            return self.place_state(argument)
        if i not in self.batch_argnums:
            return self._other(argument, name)
        placed = self._placer.batch(argument, name)
        if placed is None:
            raise ValueError(
                f"{name} has {placement.count_rows(argument)} rows, and remainder="
                f"'drop' leaves none on {self.mesh.shape[self.axis_name]} devices: "
                "skip this batch, or use remainder='pad'"
            )
        return placed

    def _other(self, argument: Any, name: str) -> Any:
        return self._placer.other(self._scalars.alike(argument, name), name)

    def _run(self, placed: tuple[Any, ...]) -> Any:
        """Run one step on placed arguments, compiling it where they are new."""
        given, placed = placed, self._carrier.carry(placed)
        if not self._placer.is_placed(jax.tree.leaves(placed)):
            placed = wrap(placed)  # what is on no device is static
        shapes = self._key_shapes(placed[:-1])
        current = self._program(placed, shapes)
        if not self._rows_check.done:  # the step itself may have refused already
            self._rows_check(given)
        if current.strong:
            placed = (program.strengthen(placed[0], current.strong), *placed[1:])
        if not self._padding_check.concerns(placed):
            self._last_call = LastCall.of(placed, current, shapes)
        started, compiled = time.perf_counter(), self.compiles.count
        self._across.compare(current.run, placed, self.compiles.name)
        self._across.begin()
        leaves = jax.tree.leaves(placed)
        if change := current.layouts.change(leaves, lambda: self._paths(placed)):
            self.compiles.begin_again(change)
        results = current.run(*placed)
        if self.compiles.count == compiled:
            return self._finish(current, results)
        self.compiles.finish(time.perf_counter() - started)
        outputs = self._finish(current, results)
        self.wait()  # what does not fit fails here, where its arguments are known
        return outputs

    def _paths(self, args: tuple[Any, ...]) -> list[str]:
        """The path of every leaf of the arguments."""
        named = zip(self._names(args), args, strict=True)
        return [path for name, arg in named for path in packing.names(arg, name)]

    def _finish(self, current: program.Program, results: tuple[Any, Any]) -> Any:
        """The user's outputs; bounds the run-ahead and compares replicas once."""
        outputs, token = results
        if current.static_outputs:
            outputs = unwrap(outputs)
        if self._compare_replicas and current.view and current.view.suspects:
            self._compare_replicas = False
            state = self._carrier.show_state(current.state_of(outputs))
            check_replicas(state, name=self._options.name(0))
        self._run_ahead.add(current.readable(outputs) if token is None else token)
        return self._carrier.show(outputs)

    def _program(self, args: tuple[Any, ...], shapes: Any) -> program.Program:
        """The program for this structure of arguments, built when it is new."""
        key = (jax.tree.structure(args), shapes)
        if key not in self._programs:
            self._programs[key] = self._build(args)
        return self._programs[key]

    def _build(self, args: tuple[Any, ...]) -> program.Program:
        options = self._options
        names = self._names(args)
        view = DeviceView(options, names) if self.view == "device" else None
        built = program.build(
            view or global_view(options), args, options, names, self.compiles
        )
        if built.strong:
            self._strong[jax.tree.structure(args[0])] = built.strong
        built.view = view
        return built

    def _names(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        """How messages call the arguments; the last is the dict of keywords."""
        return (*map(self._options.name, range(len(args) - 1)), "keywords")

    def _key_shapes(self, args: tuple[Any, ...]) -> Any:
        """First axes that decide how other arguments are split in the device view."""
        special = (self._options.state_argnum, *self.batch_argnums)
        if self.view == "global" or len(args) <= len(special):
            return ()
        others = [arg for i, arg in enumerate(args) if i not in special]
        return tuple(np.shape(x)[:1] for x in jax.tree.leaves(others))


def _single(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _is_description(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
