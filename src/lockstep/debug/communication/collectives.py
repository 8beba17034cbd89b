"""`collectives`: what one step sends between the devices, before it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding

from lockstep.debug.communication.groups import axis_of
from lockstep.debug.communication.hlo import Instruction, read_collectives
from lockstep.debug.communication.report import Collective, Collectives
from lockstep.debug.communication.verdict import Body, Verdict, find_body, judge
from lockstep.memory import Plan, plan_call
from lockstep.parallel import ParallelStep, as_parallel
from lockstep.tree import is_array

_OF_INPUT = {"reduce-scatter"}
_MOVES = {"all-gather", "all-to-all", "ragged-all-to-all", "collective-permute"}


def collectives(
    step: Any, *args: Any, link_gb_per_s: float | None = None, **keywords: Any
) -> Collectives:
    """List what one step sends between the devices; the step does not run.

    The step is compiled and its compiled text read: every all-reduce, all-gather,
    reduce-scatter, permutation and all-to-all with what it moves, along which axis of
    the mesh, how often (in a loop as often as that runs), and which line asked for it.
    XLA merges reductions, so one all-reduce may carry all gradients and stands at the
    line of one of them.

    In the device view, and for `compat.pmap`, the flow of data is followed as well:
    a parameter whose gradient is not reduced is named before the first step.

    Args:
        step: what `parallelize`, `per_device`, `make_train_step`, `compat.pmap` or
            `jax.jit` returned, or a plain step, which is parallelized.
        args: the arguments of one call: `state, batch, ...`.
        link_gb_per_s: the speed of each device's links (1e9 bytes a second), to tell
            the time that a ring takes.
        keywords: the keyword arguments of the call.

    Raises:
        ValueError: a step for `per_device` that averages nothing at all.

    Example:
        >>> step = ls.parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        >>> report = collectives(step, jnp.zeros(3), jnp.ones((16, 3)))
        >>> [(row.kind, row.axis, row.nbytes) for row in report.rows]
        [('all-reduce', 'data', 16)]
    """
    if not hasattr(step, "lower"):
        step = as_parallel(step)
    lowered, jaxpr = _lower(plan_call(step, args, keywords))
    with _own_lines():
        compiled = lowered.compile()
    axis, mesh = 0, _mesh_of(compiled)
    if isinstance(step, ParallelStep):
        axis, mesh = step.mesh.axis_names.index(step.axis_name), dict(step.mesh.shape)
    rows = tuple(_row(x, mesh) for x in read_collectives(compiled.as_text() or ""))
    rows = tuple(row for row in rows if row.devices > 1)
    body = find_body(jaxpr, axis)
    verdict = _verdict(step, body, args)
    warnings = _warnings(rows, mesh, body, verdict)
    return Collectives(rows, mesh, verdict, tuple(warnings), link_gb_per_s)


def _lower(plan: Plan) -> tuple[Any, core.Jaxpr]:
    """The lowered program of a call, and its jaxpr."""
    with plan.unnoted() as step:
        if hasattr(step, "trace"):
            traced = step.trace(*plan.args, **plan.keywords)
            return traced.lower(), traced.jaxpr.jaxpr
        return step.lower(*plan.args, **plan.keywords), _jaxpr(step, plan)


def _jaxpr(step: Any, plan: Plan) -> core.Jaxpr:
    """The jaxpr of a mapped function; what is no array is part of the program."""
    leaves, structure = jax.tree.flatten((plan.args, plan.keywords))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)}

    def call(values: dict[int, Any]) -> Any:
        filled = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, keywords = jax.tree.unflatten(structure, filled)
        return step(*args, **keywords)

    return jax.make_jaxpr(call)(arrays).jaxpr


@contextmanager
def _own_lines() -> Iterator[None]:
    """Compile with this program's own source lines.

    JAX's compilation cache on disk gives equal programs one entry, whatever the lines
    of their sources, and the lines would be those of the first.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _mesh_of(compiled: Any) -> dict[str, int]:
    """The mesh of a program's inputs; one nameless axis if they have none."""
    leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for where in leaves:
        if isinstance(where, NamedSharding) and where.mesh.size > 1:
            return {str(name): size for name, size in where.mesh.shape.items()}
    return {"devices": max((len(x.device_set) for x in leaves), default=1)}


def _row(found: Instruction, mesh: dict[str, int]) -> Collective:
    pairs = found.kind == "collective-permute"
    axis, devices = axis_of(found.groups, mesh, pairs=pairs)
    nbytes = sum(array.nbytes for array in found.results)
    return Collective(
        kind=found.kind,
        arrays=tuple(map(str, found.results)),
        axis=axis,
        devices=devices,
        nbytes=nbytes * (devices if found.kind in _OF_INPUT else 1),
        rounds=found.rounds,
        in_loop=found.in_loop,
        rounds_known=found.rounds_known,
        source=found.source,
        operation=found.operation,
    )


def _verdict(step: Any, body: Body | None, args: tuple[Any, ...]) -> Verdict | None:
    """The verdict, where the first argument is a state that comes back."""
    if body is None or not args:
        return None
    if isinstance(step, ParallelStep) and 0 in step.batch_argnums:
        return None
    return judge(body, args[0])


def _warnings(
    rows: tuple[Collective, ...],
    mesh: dict[str, int],
    body: Body | None,
    verdict: Verdict | None,
) -> list[str]:
    found = verdict.warnings() if verdict else []
    for row in rows:
        if row.in_loop and row.kind in ("all-reduce", "reduce-scatter"):
            times = f"{row.rounds} times" if row.rounds_known else "in every round"
            found.append(
                f"{row.place}: this {row.kind} of {row.nbytes:,} bytes runs {times} a "
                "step, inside a loop: sum in the loop and reduce once after it; for "
                "microbatches, make_train_step(..., axis_name=..., accumulate=k)"
            )
        if body is None and row.kind in _MOVES:
            found.append(
                f"{row.place}: {row.kind} of {row.nbytes:,} bytes: rows, or what was "
                "computed from them, leave their device. A sort, a shuffle, a reshape "
                "or a slice of the rows does that; keep the rows on axis 0, and "
                "shuffle on the host"
            )
    if not rows and max(mesh.values()) > 1:
        found.append(
            "the devices exchange nothing: all of them compute the same (a batch that "
            "is whole on every device?), or each one alone"
        )
    return found
