"""Several steps in one dispatch, for steps so small that the dispatch is their cost."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.compiles import CompileLog
from lockstep.parallel.program import Program
from lockstep.parallel.static_leaves import unwrap


def together(
    program: Program,
    state: Any,
    count: int,
    names: Sequence[str],
    compiles: CompileLog,
) -> Callable[..., Any]:
    """A program that runs `count` steps of another one.

    Args:
        program: one step, which returns its state first.
        state: the placed state, for where it lies.
        count: how many steps a call has.
        names: how the arguments of one step are called.
        compiles: where the compile is noted.

    Returns:
        `(state, calls) -> (state, results)`, where `calls` holds for each step its
        placed arguments after the state, and `results` what each step returned after
        its state, with its token: arrays of their own, as of steps called one by one.
        The state is donated if one step donates it.
    """

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
