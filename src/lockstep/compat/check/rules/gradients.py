"""Gradients over devices: averaged once, after they are taken."""

import ast
import re
from collections.abc import Iterator

from lockstep.compat.check.code import (
    AVERAGES,
    FUNCTIONS,
    GRADS,
    REDUCTIONS,
    constant,
    keyword,
    last_name,
)
from lockstep.compat.check.differentiated import is_by_inputs
from lockstep.compat.check.findings import Level
from lockstep.compat.check.mapped import Mapped
from lockstep.compat.check.module import Module, Remarks, rule
from lockstep.compat.check.scopes import Function

_GRAD_NAME = re.compile("grad", re.IGNORECASE)
_REDUCES_BY_NAME = re.compile("pmean|psum|all_?reduce|axis_name|sync|aggregate", re.I)
_METRIC_NAME = re.compile(
    r"(?!.*grad)(\w*_)?(loss|losses|metrics?|acc|accuracy|logs?|batch_stats|norm|count|lr)(_\w*)?"
)
_USES_GRADS = {
    "update",
    "apply_gradients",
    "apply_gradient",
    "apply_updates",
    "replace",
}
_KNOWN_LIBRARIES = ("jax", "numpy", "optax", "flax", "haiku", "functools", "chex")


@rule(Level.WARNING)
def no_reduction(module: Module) -> Remarks:
    """Finds train steps that never average over devices: their replicas drift apart."""
    for mapped in module.mapped.pmapped:
        if mapped.function is None:
            continue
        nodes = module.reach(mapped.function)
        if _trains(module, nodes) and not _may_reduce(module, mapped, nodes):
            yield (
                mapped.node,
                f"{mapped.name} takes gradients and never averages them over the "
                "devices, so that each trains a model of its own on its part of the "
                "batch: add grads = jax.lax.pmean(grads, axis_name); if separate "
                "models are meant, this is right",
            )


def _trains(module: Module, nodes: list[ast.AST]) -> bool:
    """Whether gradients are taken by what the devices are to share."""
    return any(
        module.is_call_of(node, GRADS) and not is_by_inputs(module, node, nodes)
        for node in nodes
    )


def _may_reduce(module: Module, mapped: Mapped, nodes: list[ast.AST]) -> bool:
    """Whether anything in it reduces gradients, or could do so out of sight."""
    others = _reductions_of_metrics(module, nodes)
    for node in nodes:
        if node in others:
            continue
        if isinstance(node, (ast.Name, ast.Attribute)):
            if module.dotted(node) in REDUCTIONS:
                return True
            if _REDUCES_BY_NAME.search(last_name(node)):
                return True
        elif isinstance(node, ast.Constant):
            if node.value == mapped.axis is not None and node not in _own(mapped):
                return True
        elif isinstance(node, ast.keyword) and _REDUCES_BY_NAME.search(node.arg or ""):
            if node.value not in _own(mapped):
                return True
        elif isinstance(node, ast.Call):
            if _hands_on_gradients(module, node) or _optimizer_reduces(module, node):
                return True
    return False


def _reductions_of_metrics(module: Module, nodes: list[ast.AST]) -> set[ast.AST]:
    """All that belongs to calls such as `pmean(loss)`, which leave gradients alone."""
    found: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and module.dotted(node.func) in REDUCTIONS:
            inside = ast.walk(node.args[0]) if node.args else ()
            names = [n.id for n in inside if isinstance(n, ast.Name)]
            if names and all(map(_METRIC_NAME.fullmatch, names)):
                found.update(ast.walk(node))
    return found


def _optimizer_reduces(module: Module, call: ast.Call) -> bool:
    """Whether `optimizer.update` has a part that averages, written in this program."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr != "update":
        return False
    made = module.value(func.value)
    parts = ast.walk(made) if made is not None else ()
    functions = [module.function(p.func) for p in parts if isinstance(p, ast.Call)]
    return any(
        module.is_call_of(node, REDUCTIONS)
        for function in functions
        if function is not None
        for node in ast.walk(function)
    )


def _own(mapped: Mapped) -> list[ast.AST]:
    """What `pmap` itself is given, which a decorator puts inside the function."""
    return list(ast.walk(mapped.node))


def _hands_on_gradients(module: Module, call: ast.Call) -> bool:
    """Whether gradients go to a function that cannot be looked into."""
    dotted = module.dotted(call.func)
    if dotted.startswith(_KNOWN_LIBRARIES) or last_name(call.func) in _USES_GRADS:
        return False
    if module.function(call.func) is not None:
        return False
    return any(_GRAD_NAME.search(last_name(argument)) for argument in call.args)


@rule(Level.WARNING)
def pmean_in_loss(module: Module) -> Remarks:
    """Finds losses averaged over devices before they are differentiated, alone."""
    for call, dotted in module.calls:
        if dotted not in GRADS or not call.args:
            continue
        loss = module.function(call.args[0])
        if loss is None or _averages_after(module, call, loss):
            continue
        for returned in _losses(module, call, loss):
            if module.is_call_of(returned, AVERAGES):
                yield (
                    returned,
                    "the loss is averaged over devices before its gradient is taken: "
                    "the loss is right and the gradients are those of each device "
                    "alone; return the local loss and average the gradients, "
                    "grads = jax.lax.pmean(grads, axis_name)",
                )


def _losses(module: Module, grad: ast.Call, loss: Function) -> Iterator[ast.expr]:
    """What of the loss function's results is differentiated."""
    has_aux = constant(keyword(grad, "has_aux")) is True
    for returned in module.returns(loss):
        if has_aux and isinstance(returned, ast.Tuple) and returned.elts:
            returned = returned.elts[0]
        value = module.value(returned)
        if value is not None:
            yield value


def _averages_after(module: Module, grad: ast.Call, loss: Function) -> bool:
    """Whether gradients are averaged outside the loss, in the function around."""
    around = module.scopes.enclosing(grad, *FUNCTIONS) or module.tree
    inside = set(ast.walk(loss))
    taken = _targets_of(module, grad)
    for node in ast.walk(around):
        if node not in inside and module.is_call_of(node, AVERAGES):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if names & taken or any(map(_GRAD_NAME.search, names)):
                return True
    return False


def _targets_of(module: Module, node: ast.AST) -> set[str]:
    for around in module.scopes.ancestors(node):
        if isinstance(around, ast.Assign):
            names = (n for t in around.targets for n in ast.walk(t))
            return {n.id for n in names if isinstance(n, ast.Name)}
        if isinstance(around, ast.stmt):
            break
    return set()
