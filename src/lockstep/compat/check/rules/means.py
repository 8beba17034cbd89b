"""Means under masks: sums are reduced, never means."""

import ast
import re
from functools import partial

from lockstep.compat.check.code import FUNCTIONS, Code, keyword, last_name
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule
from lockstep.compat.check.scopes import Function

_MASK = re.compile(r"mask|valid|weights$|(^|_)pad(ding)?s?($|_)", re.IGNORECASE)
_SUMS = {"jax.numpy.sum", "numpy.sum", "sum"}
_WEIGHTED = {"jax.numpy.mean": "where", "jax.numpy.average": "weights"}
_SAFE = {"jax.numpy.maximum", "jax.numpy.clip", "max"}


@rule(Level.WARNING)
def mean_of_means(module: Module) -> Remarks:
    """Finds masked means that `pmean` averages as if all devices had as many rows."""
    for mapped in module.mapped.all:
        if mapped.function is None or mapped.how.endswith("parallelize"):
            continue
        nodes = module.reach(mapped.function)
        averages = any(module.dotted(n) == "jax.lax.pmean" for n in nodes)
        if not averages:
            continue
        for node in filter(partial(_is_masked_mean, module), nodes):
            if not _is_per_row(module, node) and not _sums_beside(module, node):
                yield (
                    node,
                    "each device divides by the count of its own rows and pmean then "
                    "averages the quotients, a mean of means, which is another number "
                    "where the masks differ: reduce sum and count, "
                    "psum(total, axis) / psum(count, axis), or return "
                    "lockstep.Mean(total, count)",
                )


def _is_masked_mean(module: Module, node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_count(module, node.right)
    if isinstance(node, ast.Call):
        weights = _WEIGHTED.get(module.dotted(node.func))
        if weights and not keyword(node, "axis") and len(node.args) == 1:
            return keyword(node, weights) is not None
    return False


def _is_count(module: Module, node: ast.expr) -> bool:
    """Whether it is the sum of a whole mask: without an axis, and on one device."""
    made = module.value(node)
    if isinstance(node, ast.Name) and isinstance(made, ast.Call):
        made = _returned(module, node, made)
    if not isinstance(made, ast.Call):
        return False
    if module.dotted(made.func) in _SAFE:
        return any(_is_count(module, argument) for argument in made.args)
    if keyword(made, "axis") is not None:
        return False
    if module.dotted(made.func) in _SUMS and len(made.args) == 1:
        return bool(_MASK.search(_name_in(made.args[0])))
    method = isinstance(made.func, ast.Attribute) and made.func.attr == "sum"
    if method and not made.args:
        return bool(_MASK.search(_name_in(made.func.value)))  # pyright: ignore
    return False


def _returned(module: Module, name: ast.Name, call: ast.Call) -> ast.expr | None:
    """What a function of this module returned for `total, count = function()`."""
    binding, function = module.binding(name), module.function(call.func)
    if function is None or binding is None or binding.at is None:
        return call
    for value in module.returns(function):
        if isinstance(value, ast.Tuple) and binding.at < len(value.elts):
            return module.value(value.elts[binding.at])
    return None


def _name_in(node: ast.AST) -> str:
    """`mask` of `batch['mask']`, `batch.mask` or `mask`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return last_name(node)


def _sums_beside(code: Code, node: ast.AST) -> bool:
    """Whether the functions around it sum something over devices: a count, say."""
    around = [a for a in code.scopes.ancestors(node) if isinstance(a, FUNCTIONS)]
    inside = ast.walk(around[-1]) if around else ()
    return any(
        isinstance(n, ast.Call) and code.dotted(n.func) == "jax.lax.psum"
        for n in inside
    )


def _is_per_row(module: Module, node: ast.AST) -> bool:
    """Whether the mean is taken inside `vmap`, over the elements of one row."""
    around = [a for a in module.scopes.ancestors(node) if isinstance(a, FUNCTIONS)]
    return any(_is_vmapped(module, function) for function in around)


def _is_vmapped(module: Module, function: Function) -> bool:
    for call, dotted in module.calls:
        if dotted == "jax.vmap" and call.args:
            if module.function(call.args[0]) is function:
                return True
    return any(
        "jax.vmap" in module.dotted(decorator)
        for decorator in getattr(function, "decorator_list", ())
    )
