"""Several steps in one dispatch, for steps so small that the dispatch is their cost."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.compiles import CompileLog
from lockstep.parallel.program import Program
from lockstep.parallel.static_leaves import unwrap


class Together:
    """Runs several steps of one program, as a program that is made once."""

    def __init__(self, compiles: CompileLog) -> None:
        """Compiles are noted in the log of the one step."""
        self._compiles = compiles
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(
        self,
        program: Program,
        state: Any,
        calls: tuple[Any, ...],
        names: Sequence[str],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Dispatch the steps.

        Args:
            program: one step, which returns its state first.
            state: the placed state; donated if one step donates it.
            calls: for each step its placed arguments after the state.
            names: how the arguments of one step are called.

        Returns:
            The last state, and what each step returned after its state, with its
            token: arrays of their own, as of steps called one by one.
        """
        key = (id(program), len(calls))
        if key not in self._made:
            self._made[key] = _program_of_many(
                program, state, len(calls), names, self._compiles
            )
        started, compiled = time.perf_counter(), self._compiles.count
        results = self._made[key](state, calls)
        if self._compiles.count > compiled:
            self._compiles.finish(time.perf_counter() - started)
        return results


def _program_of_many(
    program: Program,
    state: Any,
    count: int,
    names: Sequence[str],
    compiles: CompileLog,
) -> Callable[..., Any]:
    """A program that runs `count` steps of another one."""

    def run(state: Any, calls: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        arguments = dict(zip(names, map(unwrap, (state, *calls[0])), strict=True))
        compiles.begin(arguments, planned=f"{count} steps in one call")

        def one(state: Any, call: Any) -> tuple[Any, Any]:
            (state, *rest), token = program.nested(state, *call)
            return state, (rest, token)

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
        state, outputs = jax.lax.scan(one, state, stacked)
        return state, tuple(_at(i, outputs) for i in range(count))

    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    donated = (0,) if 0 in program.donated else ()
    return jax.jit(
        run,
        donate_argnums=donated,
        out_shardings=(layout, None),
        compiler_options=program.compiler_options,
    )


def alike(calls: Sequence[Any]) -> bool:
    """Whether all calls have arguments of one form, so that they can be stacked."""
    first, structure = jax.tree.flatten(calls[0])
    for call in calls[1:]:
        leaves, other = jax.tree.flatten(call)
        if other != structure:
            return False
        for a, b in zip(first, leaves, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or a.sharding != b.sharding:
                return False
    return True


def _at(i: int, stacked: Any) -> Any:
    return jax.tree.map(lambda x: x[i], stacked)
