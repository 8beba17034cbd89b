"""`lockstep bench my_step.py:make`: which view and options are fastest here."""

from collections.abc import Callable
from functools import partial

from jax.sharding import Mesh

from lockstep.bench import handwritten, ours, report
from lockstep.bench.contender import Contender
from lockstep.bench.timing import Row, take_turns
from lockstep.bench.workload import OwnStep, Workload, row_count

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
        "one device": partial(handwritten.alone, work, mesh),
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
    fastest = report.best(rows, ours=True)
    options = OPTIONS.get(fastest.name)
    if options is None:
        advice = f"{fastest.name}(step, mesh)"
    else:
        words = [f"{name}={value!r}" for name, value in options.items()]
        advice = f"make_train_step({', '.join(['loss', 'optimizer', *words])})"
    memory = [row for row in rows if row.ours and row.nbytes is not None]
    smallest = min(memory, key=lambda row: row.nbytes or 0)
    return "\n".join(
        [
            report.as_table(title, rows, base),
            "",
            f"fastest here: {fastest.name} ({fastest.median:.3f} ms a step): {advice}",
            f"least memory: {smallest.name}",
        ]
    )
