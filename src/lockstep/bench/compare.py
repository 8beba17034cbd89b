"""`lockstep bench my_step.py:make`: which view and options are fastest here."""

from collections.abc import Callable
from functools import partial

from jax.sharding import Mesh

from lockstep.bench import handwritten, ours, report
from lockstep.bench.contender import Contender
from lockstep.bench.timing import Row, take_turns
from lockstep.bench.workload import OwnStep, Workload, row_count

ALONE = "one device"

# The rows by `make_train_step`, with their options as the user would write them. The
# hand-written steps do not compute the norm of the gradient, so neither do these.
OPTIONS = {
    "train step, global view": {"grad_norm": False},
    "train step, device view": {"axis_name": "data", "grad_norm": False},
    "train step, sharded optimizer": {
        "axis_name": "data",
        "grad_norm": False,
        "optimizer_sharding": "data",
    },
    "train step, same bits": {
        "axis_name": "data",
        "grad_norm": False,
        "fixed_shards": 8,
    },
}


def makers_for(
    work: Workload | OwnStep, mesh: Mesh
) -> dict[str, Callable[[], Contender]]:
    """The contenders for this work, each ready to be made."""
    if isinstance(work, OwnStep):
        return {"your own step": partial(ours.own, work, mesh)}
    return {
        ALONE: partial(handwritten.alone, work, mesh),
        "hand-written jit": partial(handwritten.jitted, work, mesh),
        "hand-written shard_map": partial(handwritten.sharded, work, mesh),
        ours.PARALLELIZE: partial(ours.parallelized, work, mesh),
        **{
            name: partial(ours.made, work, mesh, name, **options)
            for name, options in OPTIONS.items()
        },
        ours.FROM_THE_HOST: partial(ours.from_the_host, work, mesh),
    }


def compare(work: Workload | OwnStep, mesh: Mesh, *, turns: int = 10) -> list[Row]:
    """Time everything that can run this work.

    A contender that refuses it (an optimizer that cannot be sharded, a loss whose rows
    meet) is left out, and it is said why.

    Raises:
        ValueError: none of lockstep's is left.
    """
    makers = makers_for(work, mesh)
    rows = take_turns(makers, turns=turns, memory=True, leave_out=True)
    if not any(row.ours for row in rows):
        raise ValueError("nothing can train this here: each of them said why")
    return rows


def describe(rows: list[Row], work: Workload | OwnStep, mesh: Mesh) -> str:
    """The table, and which row to choose."""
    title = f"{row_count(work)} rows on {mesh.size} devices"
    base = next((r.name for r in rows if r.name == "hand-written jit"), rows[0].name)
    memory = [row for row in rows if row.ours and row.nbytes is not None]
    smallest = min(memory, key=lambda row: row.nbytes or 0)
    return "\n".join(
        [
            report.as_table(title, rows, base),
            "",
            *_fastest(rows, mesh),
            f"least memory: {smallest.name}",
        ]
    )


def _fastest(rows: list[Row], mesh: Mesh) -> list[str]:
    """Which row is the fastest of all, and which of lockstep's."""
    fastest, ours = report.best(rows, ours=False), report.best(rows, ours=True)
    found = f"{ours.name} ({ours.median:.3f} ms a step): {_as_written(ours.name)}"
    if fastest is ours:
        return [f"fastest here: {found}"]
    lines = [
        f"fastest here: {fastest.name} ({fastest.median:.3f} ms a step)",
        f"fastest of lockstep: {found}",
    ]
    if fastest.name == ALONE and mesh.size > 1:
        shared = mesh.devices.flat[0].platform == "cpu"
        hint = " (CPU devices share the cores of this machine)" if shared else ""
        lines.append(f"this work is too small to be split over {mesh.size}{hint}")
    return lines


def _as_written(name: str) -> str:
    """The row with this name, as the user would write it."""
    options = OPTIONS.get(name)
    if options is None:
        return f"{name}(step, mesh)"
    words = [f"{option}={value!r}" for option, value in options.items()]
    return f"make_train_step({', '.join(['loss', 'optimizer', *words])})"
