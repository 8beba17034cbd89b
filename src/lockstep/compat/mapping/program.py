"""One mapped function for one structure of arguments, on one mesh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from lockstep.compat.mapping import devices, nested
from lockstep.compat.mapping.donation import each_its_own
from lockstep.compat.mapping.leaves import MappedLeaves
from lockstep.compat.mapping.moves import Moves, is_elsewhere, places
from lockstep.compat.mapping.shards import (
    from_host,
    is_float0,
    is_none,
    no_other_mesh,
    on_rows,
    spec,
    specs,
    stacked,
)
from lockstep.compat.mapping.unbound import explain_unbound_axis
from lockstep.compat.mapping.unmapped import tell_of_differing
from lockstep.compiles import CompileLog


class Records(NamedTuple):
    """What is recorded of a mapped function, over all its programs."""

    moves: Moves
    compiles: CompileLog


class Program:
    """A function mapped over the first axis of a mesh, compiled at its first call.

    Attributes:
        leaves: what is known of the leaves of the arguments.
        wants: where each leaf has to lie.
        donated: the positions of the leaves whose memory the results may take.
    """

    def __init__(
        self,
        leaves: MappedLeaves,
        static: tuple[Any, ...],
        mesh: Mesh,
        records: Records,
    ):
        self.leaves = leaves
        self._static, self._mesh, self._records = static, mesh, records
        self._axis_name, *inner = mesh.axis_names
        self._has_inner_maps = bool(inner)
        self.wants = [self._layout(axis) for axis in leaves.axes]
        # One function, so that whichever of its programs comes first traces for all.
        function = self._function()
        self._traced = jax.jit(function)
        self._outputs, inputs = {}, {}
        if not self._has_inner_maps:  # where their results lie is up to XLA
            inputs = {"in_shardings": tuple(self.wants)}
            self._outputs = {"out_shardings": self._layouts(leaves.options.out_axes)}
        out_axes = jax.tree.leaves(leaves.options.out_axes, is_leaf=is_none)
        self._may_differ = None in out_axes and not inner
        self.donated = leaves.donated()
        self._run = jax.jit(
            function, donate_argnums=self.donated, **inputs, **self._outputs
        )

    def __call__(self, leaves: list[Any]) -> Any:
        """Runs on the leaves of the arguments."""
        leaves = self.owned(leaves)
        lie = places(leaves)
        if lie != self.wants:
            if is_traced(leaves):
                return self._traced(*leaves)
            leaves = self._place(leaves, lie)
        return self.run(leaves)

    def owned(self, leaves: list[Any]) -> list[Any]:
        """The leaves, of which the donated ones stand at no other position."""
        return each_its_own(leaves, self.donated, self._describe)

    def run(self, leaves: Sequence[jax.Array]) -> Any:
        """Runs on arrays that are in their places."""
        if self._may_differ:
            self._may_differ = False
            traced = self._traced.trace(*leaves)
            tell_of_differing(traced, self._axis_name, self.leaves.function_name())
        return self._run(*leaves)

    def lower(self, leaves: list[Any]) -> Any:
        """The lowered program, which takes the arguments in the caller's structure."""

        # The name of the parameter shows in JAX's errors.
        def structured(*flat_args: Any, **kwargs: Any) -> Any:
            return self._traced(*jax.tree.leaves((flat_args, kwargs)))

        structured.__name__ = self.leaves.function_name()
        options, inputs = self.leaves.options, {}
        args, kwargs = jax.tree.unflatten(self.leaves.tree, leaves)
        if self._outputs and not kwargs:  # for them JAX has no in_shardings
            inputs = {"in_shardings": self._layouts(options.mapped_in_axes)}
        jitted = jax.jit(
            structured, donate_argnums=options.donated, **inputs, **self._outputs
        )
        return jitted.lower(*args, **kwargs)

    def tell_moves(
        self, leaves: list[Any], wants: list[NamedSharding], among: Sequence[int]
    ) -> None:
        """Counts and tells of leaves that have to leave the place they were put in."""
        moved = [p for p in among if is_elsewhere(leaves[p], wants[p])]
        if moved:
            name, names = self._describe(leaves)
            self._records.moves.count(name, {names[p]: leaves[p] for p in moved})

    def _describe(self, leaves: Sequence[Any]) -> tuple[str, list[str]]:
        """The names of the function and of the leaves, for messages."""
        return self.leaves.function_name(), self.leaves.names(leaves)

    def _layout(self, axis: int | None) -> NamedSharding:
        if self._has_inner_maps:
            return NamedSharding(self._mesh, spec(axis, self._axis_name))
        return stacked(tuple(self._mesh.devices.flat), axis, self._axis_name)

    def _layouts(self, axes: Any) -> Any:
        return jax.tree.map(self._layout, axes, is_leaf=is_none)

    def _fits(self, here: Any, want: NamedSharding) -> bool:
        if self._has_inner_maps:  # what came out of them may be split further
            return getattr(here, "mesh", None) == self._mesh
        return here == want

    def _place(self, leaves: list[Any], lie: list[Any]) -> list[Any]:
        """All leaves where they are wanted.

        JAX would place what comes from the host by itself, but more slowly; and it
        would trace and compile again when the state of a loop comes back placed.
        """
        odd = [
            position
            for position, (here, want) in enumerate(zip(lie, self.wants, strict=True))
            if here is not want
            and not self._fits(here, want)
            and not is_float0(leaves[position])
        ]
        if not odd:
            return leaves
        self.leaves.check(leaves, self._mesh.devices.shape[0], odd)
        self.tell_moves(leaves, self.wants, odd)
        leaves, rest = list(leaves), []
        for position in odd:
            if type(leaf := leaves[position]) is np.ndarray:
                leaves[position] = from_host(leaf, self.wants[position])
            else:
                rest.append(position)
        wants = [self.wants[position] for position in rest]
        placed = jax.device_put([leaves[position] for position in rest], wants)
        for position, leaf in zip(rest, placed, strict=True):
            leaves[position] = leaf
        return leaves

    def _function(self) -> Any:
        options, axes, name = self.leaves.options, self.leaves.axes, self._axis_name

        def mapped(*leaves: Any) -> Any:  # traced once a signature
            self.leaves.check(leaves, self._mesh.devices.shape[0])
            self._note_compile(leaves)
            with no_other_mesh(self._mesh):
                out = jax.shard_map(
                    on_rows(self._call, axes, options.out_axes),
                    mesh=self._mesh,
                    in_specs=specs(axes, name),
                    out_specs=specs(options.out_axes, name),
                    axis_names={name},
                    check_vma=False,
                )(*leaves)
            devices.check_all_used(options, self._mesh)
            return out

        mapped.__name__ = self.leaves.function_name()
        return mapped

    def _note_compile(self, leaves: tuple[Any, ...]) -> None:
        static = self.leaves.static_names(len(self._static))
        self._records.compiles.begin(
            dict(zip(self.leaves.names(leaves), leaves, strict=True)),
            dict(zip(static, self._static, strict=True)),
        )

    def _call(self, *rows: Any) -> Any:
        mapped, kwargs = jax.tree.unflatten(self.leaves.tree, rows)
        args = self.leaves.options.join(mapped, self._static)
        mesh = self._mesh
        with nested.tracing(tuple(mesh.shape.items())):
            try:
                return self.leaves.fun()(*args, **kwargs)
            except NameError as error:
                name = self.leaves.function_name()
                explain_unbound_axis(error, name, mesh.axis_names)
                raise
            except (TypeError, ValueError) as error:
                self.leaves.explain_split_keys(error, rows, mesh.devices.shape[0])
                raise


def is_traced(leaves: list[Any]) -> bool:
    """Whether another transformation of JAX is at work around this call."""
    return any(issubclass(kind, Tracer) for kind in set(map(type, leaves)))
