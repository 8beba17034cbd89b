"""All programs of a mapped function: found by signature, shared by its mappings."""

import math
import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import Mesh

from lockstep import notices
from lockstep.compat.mapping import devices, nested
from lockstep.compat.mapping.host_local import SpanningProgram
from lockstep.compat.mapping.leaves import MappedLeaves
from lockstep.compat.mapping.moves import Moves
from lockstep.compat.mapping.options import Options, input_axes
from lockstep.compat.mapping.program import Program, Records
from lockstep.compiles import CompileLog

Fun = Callable[..., Any]


class Signature:
    """The programs for one structure of arguments and one set of static values."""

    def __init__(
        self,
        leaves: MappedLeaves,
        static: tuple[Any, ...],
        records: Records,
    ):
        self.leaves, self._static, self._records = leaves, static, records
        self._first = leaves.first()
        self._axis = leaves.axes[self._first]
        self._programs: dict[Hashable, Program] = {}
        self._inner: dict[int, nested.Axes] = {}

    def size(self, leaves: list[Any]) -> int:
        """The size of the mapped axis, read off the first leaf where it is known."""
        try:
            size = leaves[self._first].shape[self._axis]
        except (AttributeError, IndexError):
            size = None
        if size in self._inner:
            return size
        return self.leaves.size(leaves)

    def program(self, size: int, alone: bool = False) -> Program:
        """The program for an axis of this size.

        Args:
            size: of the mapped axis, in this process.
            alone: map over the devices of this process, whatever others there are.
        """
        options = self.leaves.options
        inner = self._inner.setdefault(size, ())
        key = size, inner, alone, get_backend(options.backend)
        if key not in self._programs:
            names, sizes = [name for name, _ in inner], [size for _, size in inner]
            picked = devices.pick(options, size, math.prod(sizes), alone)
            grid = np.reshape(picked, (-1, *sizes))
            mesh = Mesh(grid, (options.axis_name, *names))
            self._programs[key] = self._build(size, mesh)
        return self._programs[key]

    def _build(self, size: int, mesh: Mesh) -> Program:
        if mesh.size == mesh.local_mesh.size:
            return Program(self.leaves, self._static, mesh, self._records)
        alone = partial(self._warned_alone, size)
        return SpanningProgram(self.leaves, self._static, mesh, self._records, alone)

    def _warned_alone(self, size: int) -> Program:
        notices.say_once(
            "compat.pmap traced in several processes",
            "a pmap under jit, grad or vmap maps over the devices of its own process: "
            "its collectives do not reach the other processes; call it outside, or use "
            "lockstep.per_device",
        )
        return self.program(size, alone=True)

    def widen(self, size: int, axes: nested.Axes) -> None:
        """Remembers the axes of the maps inside: all but the first of `axes`."""
        self._inner[size] = axes[1:]


class Programs:
    """All programs of one function under one set of options.

    The function is held weakly, so that a program kept by JAX does not keep it alive.
    """

    def __init__(self, fun: Callable[[], Fun], options: Options):
        self._fun, self._options = fun, options
        self._signatures: dict[Hashable, Signature] = {}
        name = getattr(fun(), "__name__", type(fun()).__name__)
        self.records = Records(Moves(), CompileLog(name))

    def use(
        self,
        fun: Fun,
        action: Callable[[Program, list[Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`action(program, leaves)` with the program for the arguments.

        Tried again on a wider mesh when the function turns out to map inside. `fun`
        is the function itself, which the caller holds until this returns.
        """
        mapped, static = self._options.split(args)
        leaves, tree = jax.tree.flatten((mapped, kwargs))
        signature = self._signatures.get((tree, static))
        if signature is None:
            axes = input_axes(self._options, mapped, kwargs)
            described = MappedLeaves(self._fun, self._options, tree, axes)
            signature = Signature(described, static, self.records)
            self._signatures[tree, static] = signature
        size, log = signature.size(leaves), self.records.compiles
        started, compiled = time.perf_counter(), log.count
        while True:
            try:
                result = action(signature.program(size), leaves)
            except BaseException as error:
                log.forget_from(compiled)  # nothing came of it
                if not isinstance(error, nested.DeeperMesh):
                    raise
                signature.widen(size, error.axes)
                continue
            if log.count > compiled:
                log.finish(time.perf_counter() - started)
            return result


_shared: dict[int, tuple[weakref.ref, dict[Hashable, Programs]]] = {}
"""The programs of each function, by its identity, and by the options of the mapping."""


def programs_of(fun: Fun, options: Options) -> Programs:
    """The programs of `fun`, shared by all its mappings with equal options.

    So a `pmap(f)(x)` written inside a loop compiles once.

    Raises:
        TypeError: `fun` is no function.
    """
    if not callable(fun):
        raise TypeError(f"pmap needs a function, got {fun!r}")
    reference, by_options = _shared.get(id(fun), (None, {}))
    if reference is None or reference() is not fun:
        try:
            reference = weakref.ref(fun, partial(_shared.pop, id(fun)))
        except TypeError:  # this callable cannot be held weakly, nor be shared
            return Programs(lambda: fun, options)
        by_options = {}
        _shared[id(fun)] = reference, by_options
    alive: Any = reference
    return by_options.setdefault(options.key(), Programs(alive, options))
