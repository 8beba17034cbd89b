"""Layers whose meaning depends on how rows are spread over devices."""

import ast
from collections.abc import Iterator

from lockstep.compat.check.code import PARTIAL, Code, constant, keyword
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule

_BATCH_NORMS = {
    "flax.linen.BatchNorm": "axis_name",
    "flax.linen.normalization.BatchNorm": "axis_name",
    "flax.nnx.BatchNorm": "axis_name",
    "haiku.BatchNorm": "cross_replica_axis",
}


@rule(Level.WARNING)
def batchnorm_of_one_device(module: Module) -> Remarks:
    """Finds BatchNorm over the rows of one device, which under jit is over all."""
    for call, axis, given in _batch_norms(module):
        if not given:
            yield (
                call,
                "under pmap this normalizes by the rows of one device, under "
                "parallelize (jit) by those of the whole batch: the curve changes. "
                f"{axis}=... makes pmap do that too, per_device keeps it local",
            )


@rule(Level.NOTE)
def batchnorm_with_axis_name(module: Module) -> Remarks:
    """Finds BatchNorm that names the device axis, which exists under pmap alone."""
    for call, axis, given in _batch_norms(module):
        if given:
            yield (
                call,
                f"{axis} is not bound under parallelize (jit), where the batch is "
                "whole already: leave it out there; lockstep.per_device binds it",
            )


@rule(Level.WARNING)
def unpacked_pop(module: Module) -> Remarks:
    """Finds `state, params = variables.pop("params")`: a dict pops one value."""
    for node in module.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        call, pairs = node.value, [t for t in node.targets if isinstance(t, ast.Tuple)]
        pops = isinstance(call.func, ast.Attribute) and call.func.attr == "pop"
        if pops and len(call.args) == 1 and constant(call.args[0]) == "params":
            if any(len(target.elts) == 2 for target in pairs):
                yield (
                    node,
                    "since Flax 0.7 init returns a dict, whose pop returns one value, "
                    "and this unpacks its keys: use flax.core.pop(variables, 'params') "
                    "or run with FLAX_RETURN_FROZENDICT=1",
                )


def _batch_norms(module: Module) -> Iterator[tuple[ast.Call, str, bool]]:
    """Each BatchNorm of a program that maps over devices; whether it has an axis."""
    if not module.runs_in_pmap:
        return
    for call, dotted in module.calls:
        axis = _BATCH_NORMS.get(dotted) or _by_partial(module, call, dotted)
        if axis is None or constant(keyword(call, "use_running_average")) is True:
            continue
        value = keyword(call, axis)
        given = value is not None and not _is_none(value)
        yield call, axis, given


def _by_partial(code: Code, call: ast.Call, dotted: str) -> str | None:
    if dotted in PARTIAL and call.args:
        return _BATCH_NORMS.get(code.dotted(call.args[0]))
    return None


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
