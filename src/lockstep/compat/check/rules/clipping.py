"""Gradients over devices: averaged before they are clipped."""

import ast
import re
from collections.abc import Iterator

from lockstep.compat.check.code import AVERAGES, GRADS, TREE_MAPS, last_name
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule

_GRAD_NAME = re.compile("grad", re.IGNORECASE)
_CLIP_NAME = re.compile("clip|adaptive_grad_clip")


@rule(Level.WARNING)
def clip_before_pmean(module: Module) -> Remarks:
    """Finds gradients clipped on each device before they are averaged."""
    for call, dotted in module.calls:
        if dotted in AVERAGES and call.args:
            for made in _made(module, call.args[0]):
                if isinstance(made, ast.Call) and _clips_gradients(module, made):
                    yield (
                        made,
                        "gradients are clipped before they are averaged, so that each "
                        "device clips its own part and the result depends on their "
                        "number: average first, then clip",
                    )


def _made(module: Module, node: ast.AST, depth: int = 0) -> Iterator[ast.AST]:
    """The expressions that a value comes from, of a tuple those of its elements."""
    made = module.value(node)
    if isinstance(made, ast.Subscript):  # clipper.update(grads, state)[0]
        whole = module.value(made.value)
        made = whole if isinstance(whole, ast.Call) else made
    if isinstance(made, ast.Dict):
        parts: list[ast.expr] = made.values
    else:
        parts = made.elts if isinstance(made, (ast.Tuple, ast.List)) else []
    if not parts and made is not None:
        yield made
    for part in parts if depth < 5 else ():
        yield from _made(module, part, depth + 1)


def _clips_gradients(module: Module, call: ast.Call) -> bool:
    if not call.args or not _is_clip(module, call):
        return False
    gradients = [a for a in call.args if _is_gradients(module, a)]
    return any(
        not _is_per_row(module, g) and not _is_averaged(module, g) for g in gradients
    )


def _is_gradients(module: Module, node: ast.expr) -> bool:
    """Whether a value is called so, or is what `jax.grad(loss)(...)` returned."""
    if _GRAD_NAME.search(last_name(node)):
        return True
    made, binding = module.value(node), module.binding(node)
    taken = module.value(made.func) if isinstance(made, ast.Call) else None
    if binding is None or taken is None or not module.is_call_of(taken, GRADS):
        return False
    with_loss = isinstance(taken, ast.Call) and "value" in last_name(taken.func)
    return binding.at == 1 if with_loss else not binding.at


def _is_clip(module: Module, call: ast.Call) -> bool:
    if module.dotted(call.func) in TREE_MAPS:
        function = module.function(call.args[0])
        inside = ast.walk(function.body) if isinstance(function, ast.Lambda) else ()
        return any(
            isinstance(n, ast.Call) and "clip" in last_name(n.func) for n in inside
        )
    if last_name(call.func) == "update" and isinstance(call.func, ast.Attribute):
        return _has_clip(module, call.func.value)
    return "clip" in last_name(call.func)


def _has_clip(module: Module, optimizer: ast.AST, depth: int = 0) -> bool:
    """Whether an optimizer is or holds `optax.clip_by_global_norm` or its like."""
    made = module.value(optimizer)
    if not isinstance(made, ast.Call) or depth > 5:
        return False
    if _CLIP_NAME.match(last_name(made.func)):
        return True
    parts = [*made.args, *(keyword.value for keyword in made.keywords)]
    return any(_has_clip(module, part, depth + 1) for part in parts)


def _is_per_row(module: Module, gradients: ast.expr) -> bool:
    """Whether these are gradients of single rows, which are clipped one by one."""
    made = module.value(gradients)
    inside = [made, *ast.walk(made)] if made is not None else []
    calls = (n for n in inside if isinstance(n, ast.Call))
    for call in calls:
        functions = [module.dotted(call.func)]
        target = module.value(call.func)
        if isinstance(target, ast.Call):
            functions.append(module.dotted(target.func))
        if "jax.vmap" in functions:
            return True
    return False


def _is_averaged(module: Module, gradients: ast.expr) -> bool:
    made = module.value(gradients)
    return made is not None and any(
        module.dotted(node) in AVERAGES
        for node in ast.walk(made)
        if isinstance(node, (ast.Name, ast.Attribute))
    )
