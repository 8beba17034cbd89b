"""Which dotted names a module uses, where it is not ready to miss them."""

import ast
from collections.abc import Iterator

from lockstep.compat.check.code import Code
from lockstep.compat.names import look_up


def uses(code: Code) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names in imports and expressions, but for those that are guarded."""
    set_here = {code.dotted(n) for n in code.nodes if _is_stored(n)} - {""}
    for node in code.nodes:
        for dotted in _dotted_names(code, node):
            if dotted not in set_here and not _is_guarded(code, node):
                yield node, dotted


def _dotted_names(code: Code, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            # `jax.config` is an object today: the module of that name is gone.
            yield "jax.config.config" if alias.name == "jax.config" else alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute):
        whole = not isinstance(code.scopes.parents[node], ast.Attribute)
        if whole and not _is_said_at_import(code, node):
            yield from filter(None, [code.dotted(node)])


def _is_said_at_import(code: Code, node: ast.expr) -> bool:
    """Whether the first name of `a.b.c` was imported by a name that has a row."""
    while isinstance(node, ast.Attribute):
        node = node.value
    binding = code.binding(node)
    return binding is not None and look_up(binding.dotted) is not None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _is_guarded(code: Code, node: ast.AST) -> bool:
    """Whether the code is ready for the name to be missing."""
    for around in code.scopes.ancestors(node):
        if isinstance(around, ast.Try) and any(
            _catches(handler, len(around.body)) for handler in around.handlers
        ):
            return True
        if isinstance(around, (ast.If, ast.IfExp)):
            test = ast.unparse(around.test)
            if "hasattr" in test or "version" in test:
                return True
    return False


def _catches(handler: ast.ExceptHandler, statements: int) -> bool:
    caught = ast.walk(handler.type) if handler.type else ()
    names = {n.id for n in caught if isinstance(n, ast.Name)}
    if names & {"ImportError", "ModuleNotFoundError", "AttributeError"}:
        return True
    catches_all = handler.type is None or "Exception" in names
    return catches_all and statements <= 3  # more of them guard something else
