"""The next step from `pmap` to today's JAX, for each mapped function."""

import ast

from lockstep.compat.check.code import GRADS, REDUCTIONS
from lockstep.compat.check.findings import Level
from lockstep.compat.check.mapped import PER_DEVICE
from lockstep.compat.check.module import Module, Remarks, rule

_PER_DEVICE_ONLY = REDUCTIONS - {"jax.lax.pmean"} | {"jax.lax.axis_index"}


@rule(Level.NOTE)
def next_step(module: Module) -> Remarks:
    """Says which rung of compat.pmap, per_device, parallelize comes next, and how."""
    for mapped in module.mapped.all:
        nodes = module.reach(mapped.function) if mapped.function else []
        dotted = {
            module.dotted(n) for n in nodes if isinstance(n, (ast.Name, ast.Attribute))
        }
        if mapped.how.startswith(("jax.", "flax.")):
            yield mapped.node, _from_jax(mapped.name)
        elif mapped.is_pmap:
            yield mapped.node, _from_compat(mapped.name, bool(dotted & GRADS))
        elif mapped.how in PER_DEVICE and "jax.lax.pmean" in dotted:
            if not dotted & _PER_DEVICE_ONLY:
                yield mapped.node, _from_per_device(mapped.name)


def _from_jax(name: str) -> str:
    return (
        f"next for {name}: lockstep.compat.pmap in place of jax.pmap, with the same "
        "arguments (docs/migrate.md)"
    )


def _from_compat(name: str, trains: bool) -> str:
    state = "the state by lockstep.replicate" if trains else "its inputs whole"
    return (
        f"next for {name}: lockstep.per_device, which takes {state} and batches "
        "without a device axis; the function stays as it is (docs/migrate.md)"
    )


def _from_per_device(name: str) -> str:
    return (
        f"next for {name}: lockstep.parallelize, without the pmean lines and the axis "
        "name: one program over the whole batch (docs/migrate.md)"
    )
