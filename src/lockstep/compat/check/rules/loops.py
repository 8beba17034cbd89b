"""The training loop: what makes the host wait for the devices, or hang."""

import ast
from collections.abc import Iterator

from lockstep.compat.check.code import FUNCTIONS, constant, keyword, last_name
from lockstep.compat.check.findings import Level
from lockstep.compat.check.module import Module, Remarks, rule

_FETCHES = {
    "float",
    "int",
    "jax.device_get",
    "numpy.array",
    "numpy.asarray",
}
_METHODS = {"item", "tolist"}
_LOOPS = (ast.For, ast.While, ast.AsyncFor)


@rule(Level.WARNING)
def fetch_in_loop(module: Module) -> Remarks:
    """Finds loops that wait for the result of every step."""
    found: dict[ast.AST, list[ast.Call]] = {}
    for call, dotted in module.calls:
        loop = _innermost_loop(module, call)
        fetched = _fetched(call, dotted)
        if loop is not None and fetched is not None:
            if _comes_from_step(module, fetched, loop) and not _tests(module, call):
                found.setdefault(loop, []).append(call)
    for first, *others in found.values():
        also = f", and so do {len(others)} more lines" if others else ""
        yield (
            first,
            f"{ast.unparse(first)} waits for the devices in every step{also}: keep "
            "the metrics on the devices and read them every 100 steps, say",
        )


def _innermost_loop(module: Module, node: ast.AST) -> ast.AST | None:
    """The loop that runs a node in each turn: no `if` stands in between."""
    child = node
    for around in module.scopes.ancestors(node):
        if isinstance(around, _LOOPS):
            return around if child in around.body else None
        if isinstance(around, FUNCTIONS):
            return None
        if isinstance(around, (ast.If, ast.IfExp, ast.ExceptHandler)):
            return None
        child = around
    return None


def _tests(module: Module, node: ast.AST) -> bool:
    """Whether a value is read to be asserted: in a test, waiting does not matter."""
    for around in module.scopes.ancestors(node):
        if isinstance(around, ast.Assert):
            return True
        if isinstance(around, ast.Call) and last_name(around.func).startswith("assert"):
            return True
    return False


def _fetched(call: ast.Call, dotted: str) -> ast.expr | None:
    if dotted in _FETCHES and len(call.args) == 1:
        return call.args[0]
    if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
        return call.func.value
    return None


def _comes_from_step(module: Module, node: ast.expr, loop: ast.AST) -> bool:
    """Whether a value is, or is part of, what a mapped step returned in this loop."""
    for name in _names(node):
        binding = module.binding(name)
        made = binding.value if binding is not None else None
        if isinstance(made, ast.Call) and module.mapped.called(made) is not None:
            if loop in module.scopes.ancestors(made):
                return True
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
    return any(module.mapped.called(call) is not None for call in calls)


def _names(node: ast.expr) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))


@rule(Level.WARNING)
def ordered_print(module: Module) -> Remarks:
    """Finds ordered prints and callbacks in functions that run on many devices."""
    for call, dotted in module.calls:
        if dotted.startswith(("jax.debug.", "jax.experimental.io_callback")):
            if constant(keyword(call, "ordered")) is True and call in module.on_devices:
                yield (
                    call,
                    "ordered=True is refused on more than one device: leave it out, "
                    "or use lockstep.compat.debug_print, which prints the devices "
                    "in order",
                )


@rule(Level.WARNING)
def fork_loader(module: Module) -> Remarks:
    """Finds PyTorch loaders whose workers are forked from a process that runs JAX."""
    if not _uses_jax(module) or _sets_start_method(module):
        return
    for call, dotted in module.calls:
        if dotted in (
            "torch.utils.data.DataLoader",
            "torch.utils.data.dataloader.DataLoader",
        ):
            workers = module.value(keyword(call, "num_workers"))
            context = keyword(call, "multiprocessing_context")
            if keyword(call, "num_workers") is None or context is not None:
                continue
            if constant(workers) != 0:
                yield (
                    call,
                    "the workers are forked from a process in which JAX has threads, "
                    "and can hang: pass multiprocessing_context='spawn', and return "
                    "NumPy from the dataset",
                )


def _uses_jax(module: Module) -> bool:
    return any(
        isinstance(node, (ast.Import, ast.ImportFrom))
        and any(
            name.split(".")[0] in ("jax", "flax", "haiku", "lockstep", "optax")
            for name in [
                getattr(node, "module", None) or "",
                *(a.name for a in node.names),
            ]
        )
        for node in module.nodes
    )


def _sets_start_method(module: Module) -> bool:
    return any(
        isinstance(call.func, (ast.Attribute, ast.Name))
        and dotted.endswith("set_start_method")
        and bool(call.args)
        and constant(call.args[0]) in ("spawn", "forkserver")
        for call, dotted in module.calls
    )
