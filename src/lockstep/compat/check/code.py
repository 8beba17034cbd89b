"""One module as the rules see it: what a name stands for, what calls what."""

import ast
import builtins
from collections.abc import Iterator
from functools import cached_property

from lockstep.compat.check.scopes import Binding, Function, Scopes
from lockstep.compat.check.sources import Source

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

PARTIAL = {"functools.partial", "jax.partial", "jax.tree_util.Partial"}
GRADS = {
    "jax.grad",
    "jax.value_and_grad",
    "jax.api.grad",
    "jax.api.value_and_grad",
    "haiku.grad",
    "haiku.value_and_grad",
    "flax.nnx.grad",
    "flax.nnx.value_and_grad",
    "equinox.filter_grad",
    "equinox.filter_value_and_grad",
}
TREE_MAPS = {
    "jax.tree_map",
    "jax.tree_multimap",
    "jax.tree.map",
    "jax.tree_util.tree_map",
    "jax.tree_util.tree_multimap",
}
AVERAGES = {
    "jax.lax.pmean",
    "jax.lax.psum",
    "flax.training.common_utils.pmean",
}
REDUCTIONS = AVERAGES | {
    "jax.lax.psum_scatter",
    "jax.lax.all_gather",
    "jax.lax.pmax",
    "jax.lax.pmin",
    "jax.lax.ppermute",
    "jax.lax.all_to_all",
}
KEY_MAKERS = {
    "jax.random.PRNGKey",
    "jax.random.key",
    "jax.random.split",
    "jax.random.fold_in",
    "haiku.next_rng_key",
}
_TRANSPARENT = PARTIAL | {
    "jax.jit",
    "jax.pmap",
    "jax.vmap",
    "jax.checkpoint",
    "jax.remat",
    "jax.named_call",
    "jax.disable_jit",
    "flax.linen.jit",
    "flax.linen.remat",
    "haiku.transform",
    "haiku.transform_with_state",
    "haiku.without_apply_rng",
}


class Code:
    """The syntax tree of one file with its names resolved."""

    def __init__(self, source: Source):
        self.source = source
        self.tree = source.tree
        self.scopes = Scopes(source.tree)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes, once."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """All calls, each with the dotted name of what is called."""
        return [(n, self.dotted(n.func)) for n in self.nodes if isinstance(n, ast.Call)]

    def dotted(self, node: ast.AST | None) -> str:
        """The dotted name of an expression by its imports; empty if unknown.

        `jnp.mean` is `jax.numpy.mean` after `import jax.numpy as jnp`, and so is
        `mean` after `mean = jnp.mean`.
        """
        parts: list[str] = []
        for _ in range(50):
            if isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            elif isinstance(node, ast.Name):
                binding = self.scopes.binding(node)
                if binding is None:
                    known = not parts and hasattr(builtins, node.id)
                    return node.id if known else ""
                if binding.dotted:
                    return ".".join([binding.dotted, *reversed(parts)])
                if binding.at is not None or binding.value is None:
                    return ""
                node = binding.value
            elif isinstance(node, ast.Call) and node.args and not parts:
                if self.dotted(node.func) not in PARTIAL:
                    return ""
                node = node.args[0]
            else:
                return ""
        return ""

    def is_call_of(self, node: ast.AST, names: set[str]) -> bool:
        """Whether a node calls one of these dotted names."""
        return isinstance(node, ast.Call) and self.dotted(node.func) in names

    def binding(self, node: ast.AST | None) -> Binding | None:
        """What a name that stands somewhere is bound to there."""
        return self.scopes.binding(node) if isinstance(node, ast.Name) else None

    def value(self, node: ast.AST | None) -> ast.expr | None:
        """The expression that a name was given; of any other node the node itself.

        Of `a, b = f()`, both have the value `f()`; of `self.a` what the class gives it.
        """
        for _ in range(20):
            if isinstance(node, ast.Attribute):
                given = self._member(node)
                if not isinstance(given, ast.expr):
                    break
                node = given
                continue
            if not isinstance(node, ast.Name):
                break
            binding = self.scopes.binding(node)
            if binding is None or binding.value is None:
                return None
            node = binding.value
        return node if isinstance(node, ast.expr) else None

    def function(self, node: ast.AST | None) -> Function | None:
        """The function of this module that an expression stands for."""
        for _ in range(50):
            if isinstance(node, FUNCTIONS):
                return node
            if isinstance(node, ast.Name):
                binding = self.scopes.binding(node)
                node = binding and (binding.value or binding.node)
            elif isinstance(node, ast.Attribute):
                node = self._member(node)
            elif isinstance(node, ast.Call):
                node = self._returned_function(node)
            else:
                return None
        return None

    def _member(self, node: ast.Attribute) -> ast.AST | None:
        """What `self.name` stands for in the class around it."""
        owner = self.scopes.enclosing(node, ast.ClassDef)
        if owner is None or not isinstance(node.value, ast.Name):
            return None
        for child in ast.walk(owner):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if child.name == node.attr and self.scopes.parents[child] is owner:
                    return child
            elif isinstance(child, ast.Assign):
                if any(_is_same_member(t, node) for t in child.targets):
                    return child.value if child.value is not node else None
        return None

    def _returned_function(self, call: ast.Call) -> ast.AST | None:
        """What `jit(f)` wraps, or the function that a factory returns."""
        dotted = self.dotted(call.func)
        if (dotted in _TRANSPARENT or dotted in GRADS) and call.args:
            return call.args[0]
        factory = self.function(call.func) if dotted not in GRADS else None
        if factory is None:
            return None
        for returned in self.returns(factory):
            if isinstance(returned, (ast.Name, ast.Lambda)):
                return returned
        return None

    def returns(self, function: Function) -> Iterator[ast.expr]:
        """What a function itself returns, not the functions inside it."""
        if isinstance(function, ast.Lambda):
            yield function.body
            return
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                if self.scopes.enclosing(node, *FUNCTIONS) is function:
                    yield node.value

    def reach(self, function: Function) -> list[ast.AST]:
        """All nodes of a function and of those of this module that it uses."""
        todo, seen, nodes = [function], {function}, []
        while todo:
            inside = list(ast.walk(todo.pop()))
            nodes += inside
            for node in inside:
                if isinstance(node, (ast.Name, ast.Attribute)):
                    used = self.function(node)
                    if used is not None and used not in seen:
                        seen.add(used)
                        todo.append(used)
        return list(dict.fromkeys(nodes))


def _is_same_member(target: ast.expr, node: ast.Attribute) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == node.attr
        and isinstance(target.value, ast.Name)
        and isinstance(node.value, ast.Name)
        and target.value.id == node.value.id
    )


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first of these keywords that a call has."""
    return next((k.value for k in call.keywords if k.arg in names), None)


def constant(node: ast.AST | None) -> object:
    """The value of a literal; `None` for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def last_name(node: ast.AST | None) -> str:
    """`c` of `a.b.c`; empty for what is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
