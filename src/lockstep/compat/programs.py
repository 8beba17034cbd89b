"""The compiled programs of one mapped function: one a signature and a mesh."""

import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding

from lockstep import notices
from lockstep.compat import mapped_devices, nested
from lockstep.compat.host_local import HostLocal
from lockstep.compat.mapped_leaves import MappedLeaves
from lockstep.compat.moves import Moves, misplaced, on_the_host
from lockstep.compat.options import Options, input_axes
from lockstep.compat.shards import is_none, on_rows, spec, specs

Fun = Callable[..., Any]
Static = tuple[Any, ...]


class Program:
    """One function, for one structure of arguments, on one mesh.

    Attributes:
        run: the jitted function of the arguments that are not static.
        traced: the same without placements, for calls under another transformation.
        mesh: its first axis is the mapped one, others are of maps inside it.
        wants: the sharding of every leaf.
    """

    def __init__(self, leaves: MappedLeaves, static: Static, mesh: Mesh):
        self.mesh = mesh
        self._leaves, self._static = leaves, static
        out_axes = jax.tree.leaves(leaves.options.out_axes)
        # One object an axis, so that a call sees at a glance what is in its place.
        self._shardings = {
            axis: NamedSharding(mesh, spec(axis, mesh.axis_names[0]))
            for axis in {None, *leaves.axes, *out_axes}
        }
        self.wants = [self._shardings[axis] for axis in leaves.axes]
        function, donated = self._function(), leaves.options.donated
        self.run = jax.jit(function, donate_argnums=donated, **self._placements())
        self.traced = jax.jit(function, donate_argnums=donated)

    def __call__(self, leaves: list[Any], mapped: Any, kwargs: dict[str, Any]) -> Any:
        """Runs on arguments given both as leaves and as they are."""
        if _is_traced(leaves):
            return self.traced(*mapped, **kwargs)
        odd = self._count_misplaced(leaves, self.wants)
        if kwargs or jax.process_count() > 1:  # where JAX does not place them itself
            odd += on_the_host(leaves)
        if odd:
            self._leaves.check(leaves, self.mesh.devices.shape[0])
            targets = [self.wants[p] for p in odd]
            moved = jax.device_put([leaves[p] for p in odd], targets)
            for position, leaf in zip(odd, moved, strict=True):
                leaves[position] = leaf
            mapped, kwargs = jax.tree.unflatten(self._leaves.tree, leaves)
        return self.run(*mapped, **kwargs)

    def _count_misplaced(
        self, leaves: list[Any], wants: list[NamedSharding]
    ) -> list[int]:
        odd = misplaced(leaves, wants)
        if odd:
            names, name = self._leaves.names(), self._leaves.function_name()
            self._leaves.moves.count(name, {names[p]: leaves[p] for p in odd})
        return odd

    def lower(self, leaves: list[Any], mapped: Any, kwargs: dict[str, Any]) -> Any:
        """The lowered program, for arguments or descriptions of them."""
        return self.run.lower(*mapped, **kwargs)

    def _placements(self) -> dict[str, Any]:
        """Where the results go, and the arguments come from, as far as JAX takes it."""
        if len(self.mesh.axis_names) > 1:  # XLA follows the hints of the inner map
            return {}
        out_axes, shardings = self._leaves.options.out_axes, self._shardings
        out = jax.tree.map(shardings.get, out_axes, is_leaf=is_none)
        mapped, by_name = jax.tree.unflatten(self._leaves.tree, self.wants)
        if by_name:  # JAX has no in_shardings for keyword arguments
            return {"out_shardings": out}
        return {"in_shardings": mapped, "out_shardings": out}

    def _function(self) -> Fun:
        # The names show in JAX's errors and in the text of the compiled program.
        def mapped(*flat_args: Any, **kwargs: Any) -> Any:
            return self._map(jax.tree.leaves((flat_args, kwargs)))

        mapped.__name__ = self._leaves.function_name()
        return mapped

    def _map(self, leaves: list[Any]) -> Any:
        """Traced once a signature: the checks, then one `shard_map`."""
        options, axes, mesh = self._leaves.options, self._leaves.axes, self.mesh
        axis_name, size = next(iter(mesh.shape.items()))
        self._leaves.check(leaves, size)
        out = jax.shard_map(
            on_rows(self._call, axes, options.out_axes),
            mesh=mesh,
            in_specs=specs(axes, axis_name),
            out_specs=specs(options.out_axes, axis_name),
            axis_names={axis_name},
            check_vma=False,
        )(*leaves)
        mapped_devices.check_all_used(options, mesh)
        return out

    def _call(self, *rows: Any) -> Any:
        mapped, kwargs = jax.tree.unflatten(self._leaves.tree, rows)
        args = self._leaves.options.join(mapped, self._static)
        with nested.tracing(tuple(self.mesh.shape.items())):
            return self._leaves.fun()(*args, **kwargs)


class SpanningProgram(Program):
    """A program on the devices of several processes.

    Outside of it every array is this process's own; see `host_local`.
    """

    def __init__(
        self,
        leaves: MappedLeaves,
        static: Static,
        mesh: Mesh,
        alone: Callable[[], Program],
    ):
        super().__init__(leaves, static, mesh)
        self._border = HostLocal(mesh)
        self._wants_here = [self._border.here(want) for want in self.wants]
        self._alone = alone

    def __call__(self, leaves: list[Any], mapped: Any, kwargs: dict[str, Any]) -> Any:
        if _is_traced(leaves):
            return self._alone()(leaves, mapped, kwargs)
        self._count_misplaced(leaves, self._wants_here)
        pairs = zip(leaves, self._wants_here, strict=True)
        if any(getattr(leaf, "sharding", None) is not want for leaf, want in pairs):
            self._leaves.check(leaves, self._border.size)
        pairs = zip(leaves, self.wants, strict=True)
        wide = [self._border.to_global(leaf, want) for leaf, want in pairs]
        mapped, kwargs = jax.tree.unflatten(self._leaves.tree, wide)
        return jax.tree.map(self._border.to_local, self.run(*mapped, **kwargs))

    def lower(self, leaves: list[Any], mapped: Any, kwargs: dict[str, Any]) -> Any:
        pairs = zip(leaves, self.wants, strict=True)
        wide = [self._border.describe(leaf, want) for leaf, want in pairs]
        mapped, kwargs = jax.tree.unflatten(self._leaves.tree, wide)
        return self.run.lower(*mapped, **kwargs)


def _is_traced(leaves: list[Any]) -> bool:
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))


class Signature:
    """The programs for one structure of arguments and one set of static values."""

    def __init__(self, leaves: MappedLeaves, static: Static):
        self.leaves, self._static = leaves, static
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
        present = len(mapped_devices.mine(self.leaves.options))
        return self.leaves.size(leaves, present)

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
            picked = mapped_devices.pick(options, size, math.prod(size for _, size in inner), alone)
            names = [options.axis_name, *(name for name, _ in inner)]
            shape = [-1, *(size for _, size in inner)]
            self._programs[key] = self._build(size, Mesh(np.reshape(picked, shape), names))
        return self._programs[key]

    def _build(self, size: int, mesh: Mesh) -> Program:
        if mesh.size == mesh.local_mesh.size:
            return Program(self.leaves, self._static, mesh)
        return SpanningProgram(
            self.leaves, self._static, mesh, lambda: self._warned_alone(size)
        )

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
        self.moves = Moves()

    def use(
        self,
        fun: Fun,
        action: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`action(program, leaves, mapped, kwargs)` with the program for the arguments.

        Tried again on a wider mesh when the function turns out to map inside. `fun`
        is the function itself, which the caller holds until this returns.
        """
        mapped, static = self._options.split(args)
        leaves, tree = jax.tree.flatten((mapped, kwargs))
        signature = self._signatures.get((tree, static))
        if signature is None:
            axes = input_axes(self._options, mapped, kwargs)
            described = MappedLeaves(self._fun, self._options, tree, axes, self.moves)
            signature = self._signatures[tree, static] = Signature(described, static)
        size = signature.size(leaves)
        while True:
            try:
                return action(signature.program(size), leaves, mapped, kwargs)
            except nested.DeeperMesh as deeper:
                signature.widen(size, deeper.axes)


_shared: dict[int, tuple[weakref.ref, dict[Hashable, Programs]]] = {}


def programs_of(fun: Fun, options: Options) -> Programs:
    """The programs of `fun`, shared by all its mappings with equal options.

    So `pmap(f)(x)` written inside a loop compiles once.
    """
    try:
        entry = _shared.get(id(fun))
        if entry is None or entry[0]() is not fun:
            entry = _shared[id(fun)] = weakref.ref(fun, _forget(id(fun))), {}
    except TypeError:  # this callable takes no weak references
        return Programs(lambda: fun, options)
    reference, by_options = entry
    key = options.key()
    if key not in by_options:
        by_options[key] = Programs(reference, options)
    return by_options[key]


def _forget(identity: int) -> Callable[[weakref.ref], None]:
    def forget(reference: weakref.ref) -> None:
        if identity in _shared and _shared[identity][0] is reference:
            del _shared[identity]

    return forget
