"""Scopes of one module: which import, definition or value a name stands for."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """One place that gives a name its meaning.

    Attributes:
        node: the target, the alias of an import, a parameter, or a definition.
        dotted: what an import brings, such as `jax.numpy`; else empty.
        value: the expression assigned, where there is one.
        at: which element of the value it is or lies in, for `(a, b), c = value`; None
            for all of it.
    """

    node: ast.AST
    dotted: str = ""
    value: ast.expr | None = None
    at: int | None = None

    @property
    def line(self) -> int:
        """Where the binding takes effect."""
        return getattr(self.value or self.node, "end_lineno", 0) or 0


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class, function or comprehension, with the names bound in it."""

    node: ast.AST
    parent: "Scope | None" = None
    names: dict[str, list[Binding]] = field(default_factory=dict)

    def bind(self, name: str, binding: Binding) -> None:
        """Adds one meaning of a name."""
        self.names.setdefault(name, []).append(binding)

    def outward(self) -> Iterator["Scope"]:
        """This scope and those around it that its names are looked up in."""
        yield self
        scope = self.parent
        while scope is not None:
            if not isinstance(scope.node, ast.ClassDef):
                yield scope
            scope = scope.parent


class Scopes:
    """All scopes of a tree, and the parent of each node."""

    def __init__(self, tree: ast.Module):
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, Scope] = {}
        root = self._scopes[tree] = Scope(tree)
        self._visit_below(tree, root)

    def scope_of(self, node: ast.AST) -> Scope:
        """The innermost scope in which a node's names are looked up."""
        while node not in self._scopes:
            node = self.parents[node]
        return self._scopes[node]

    def bindings(self, name: ast.Name) -> list[Binding]:
        """All meanings of a name, in the scope that it belongs to."""
        for scope in self.scope_of(name).outward():
            if name.id in scope.names:
                return scope.names[name.id]
        return []

    def binding(self, name: ast.Name) -> Binding | None:
        """The meaning that a name has where it stands, by the order of lines."""
        for scope in self.scope_of(name).outward():
            found = scope.names.get(name.id)
            if found:
                own = scope is self._function_scope(name)
                before = [b for b in found if b.line < name.lineno] if own else found
                return (before or found)[-1]
        return None

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def enclosing(self, node: ast.AST, *kinds: type) -> ast.AST | None:
        """The innermost node around a node that is of one of the kinds."""
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def _function_scope(self, node: ast.AST) -> Scope:
        scope = self.scope_of(node)
        while isinstance(scope.node, _COMPREHENSIONS) and scope.parent:
            scope = scope.parent
        return scope

    def _visit_below(self, tree: ast.AST, root: Scope) -> None:
        """Visits in the order of the text, without recursion: code can be deep."""
        todo = [(child, tree, root) for child in ast.iter_child_nodes(tree)][::-1]
        while todo:
            node, parent, scope = todo.pop()
            self.parents[node] = parent
            for name, binding in _bindings_of(node):
                scope.bind(name, binding)
            if isinstance(node, _SCOPES):
                scope = self._scopes[node] = Scope(node, scope)
                for name, binding in _parameters(node):
                    scope.bind(name, binding)
            below = [(child, node, scope) for child in ast.iter_child_nodes(node)]
            todo += below[::-1]


def _bindings_of(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, Binding(node)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.asname or alias.name.partition(".")[0]
            dotted = alias.name if alias.asname else whole
            yield whole, Binding(alias, dotted)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            dot = "" if module.endswith(".") else "."
            yield alias.asname or alias.name, Binding(alias, module + dot + alias.name)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        yield from _targets(node.target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _targets(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _targets(node.optional_vars, None)
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name, Binding(node)


def _targets(
    target: ast.expr, value: ast.expr | None, at: int | None = None
) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, Binding(target, value=value, at=at)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value, None)
    elif isinstance(target, (ast.Tuple, ast.List)):
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(
            target.elts
        )
        for index, element in enumerate(target.elts):
            if same:
                yield from _targets(element, value.elts[index])  # pyright: ignore
            else:
                yield from _targets(element, value, index if at is None else at)


def _parameters(scope: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(scope, _FUNCTIONS):
        arguments = scope.args
        for arg in (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ):
            yield arg.arg, Binding(arg)
