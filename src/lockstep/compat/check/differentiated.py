"""What a gradient is taken by: parameters, or inputs as in adversarial examples."""

import ast
import re
from collections.abc import Iterable, Iterator

from lockstep.compat.check.code import Code, constant, keyword

_INPUT = re.compile(
    r"_?(x\w?|\w{1,2}_?hat|xs|x_\w+|\w+_x|inputs?|images?|imgs?|pixels?|obs|observations?|"
    r"batch|data|features?|adv\w*|deltas?|perturb\w*|noise|z|latents?|coords?|points?|"
    r"pos|positions?|samples?|interp\w*|mix\w*|tokens?|embed\w*|real|fakes?|actions?|t)_?"
)
_PARAMETERS = re.compile(
    r".*(param|weight|variable|theta|state|model|net|policy|critic|actor).*|w\d?"
)


def is_by_inputs(code: Code, grad: ast.AST, nodes: Iterable[ast.AST]) -> bool:
    """Whether every use of `jax.grad(f)` differentiates by inputs, not parameters.

    Read off the names of what is differentiated by: of the arguments, or else of the
    parameters of `f`. Where neither tells, it is taken to be parameters.

    Args:
        code: the module.
        grad: the call of `jax.grad` or its like.
        nodes: where it may be used.
    """
    if not isinstance(grad, ast.Call):
        return False
    uses = list(_uses(code, grad, nodes))
    return bool(uses) and all(_by_inputs(code, grad, use) for use in uses)


def _uses(code: Code, grad: ast.Call, nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls of what `jax.grad(f)` returns, also inside `vmap` or a name."""
    for node in nodes:
        if isinstance(node, ast.Call):
            made = code.value(node.func)
            if made is not None and any(part is grad for part in ast.walk(made)):
                yield node


def _by_inputs(code: Code, grad: ast.Call, use: ast.Call) -> bool:
    positions = _positions(grad)
    names = [_name_of(a) for n, a in enumerate(use.args) if n in positions]
    if len(names) < len(positions):
        return False
    if all(map(_INPUT.fullmatch, names)):
        return True
    if any(map(_PARAMETERS.fullmatch, names)):
        return False
    first = _name_of(use.args[0])
    if 0 not in positions and _PARAMETERS.fullmatch(first):
        return True  # jax.grad(energy, argnums=1)(params, something)
    function = code.function(grad.args[0]) if grad.args else None
    if function is None:
        return False
    own = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    taken = [name for n, name in enumerate(own) if n in positions]
    return bool(taken) and all(map(_INPUT.fullmatch, taken))


def _positions(grad: ast.Call) -> set[int]:
    """The `argnums` of a call of `jax.grad`, where they are written out."""
    written = keyword(grad, "argnums") or (grad.args[1] if grad.args[1:] else None)
    each = written.elts if isinstance(written, (ast.Tuple, ast.List)) else [written]
    found = {n for n in map(constant, each) if isinstance(n, int)}
    return found or {0}


def _name_of(node: ast.AST) -> str:
    """What a value is called: `x`, `image` of `batch["image"]`, `params` of `s.params`.

    Of what is computed, the name that it is computed from, if there is one alone.
    """
    if isinstance(node, ast.Subscript):
        key = constant(node.slice)
        return key if isinstance(key, str) else _name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return inside.pop() if len(inside) == 1 else ""
