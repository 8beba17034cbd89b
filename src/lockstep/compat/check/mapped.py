"""The functions that a module maps over devices, and the calls of them."""

import ast
from dataclasses import dataclass
from functools import cached_property

from lockstep.compat.check.code import Code, constant, keyword
from lockstep.compat.check.scopes import Function

PMAPS = {
    "jax.pmap",
    "jax.api.pmap",
    "flax.jax_utils.pmap",
    "lockstep.compat.pmap",
    "lockstep.compat.pmap.pmap",
}
PER_DEVICE = {"lockstep.per_device", "lockstep.parallel.per_device"}
GLOBAL = {
    "lockstep.parallelize",
    "lockstep.parallel.parallelize",
    "lockstep.make_train_step",
    "lockstep.step.make_train_step",
}


@dataclass(frozen=True, eq=False)
class Mapped:
    """One use of `pmap`, or of what came after it.

    Attributes:
        node: the call or decorator.
        how: the dotted name of what maps.
        function: the mapped function, if it is in this module.
    """

    node: ast.expr
    how: str
    function: Function | None

    @property
    def is_pmap(self) -> bool:
        """Whether the function is mapped by `pmap`."""
        return self.how in PMAPS

    @property
    def name(self) -> str:
        """The function's name, or `lambda`, or `the function`."""
        if isinstance(self.function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self.function.name
        return "the lambda" if self.function else "the mapped function"

    def option(self, name: str) -> ast.expr | None:
        """A keyword given to `pmap`; of the axis also the second argument."""
        if not isinstance(self.node, ast.Call):
            return None
        found = keyword(self.node, name)
        if found is None and name == "axis_name" and len(self.node.args) > 1:
            return self.node.args[1]
        return found

    @property
    def axis(self) -> str | None:
        """The name of the axis, where it is written out."""
        value = constant(self.option("axis_name"))
        return value if isinstance(value, str) else None


class MappedFunctions:
    """All mapped functions of a module."""

    def __init__(self, code: Code):
        self._code = code
        self._by_node: dict[ast.AST, Mapped] = {}
        for node in code.nodes:
            if isinstance(node, ast.Call):
                self._add_call(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for decorator in node.decorator_list:
                    self._add_decorator(decorator, node)

    @property
    def all(self) -> list[Mapped]:
        """Each once, in the order of the text."""
        return list(dict.fromkeys(self._by_node.values()))

    @property
    def pmapped(self) -> list[Mapped]:
        """Those mapped by `pmap`."""
        return [mapped for mapped in self.all if mapped.is_pmap]

    def called(self, call: ast.Call) -> Mapped | None:
        """The mapped function that a call calls, if it is one."""
        return self.of(call.func)

    def of(self, node: ast.AST | None) -> Mapped | None:
        """The mapped function that an expression stands for."""
        for _ in range(20):
            if node in self._by_node:
                return self._by_node[node]
            if isinstance(node, ast.Name):
                binding = self._code.scopes.binding(node)
                if binding is not None and isinstance(binding.node, ast.arg):
                    return self._names.get(node.id)
                node = binding and (binding.value or binding.node)
            elif isinstance(node, ast.Attribute):
                return self._members.get(node.attr)
            else:
                return None
        return None

    @cached_property
    def _names(self) -> dict[str, Mapped]:
        """Mapped functions by name: one passed as an argument keeps its name."""
        found = {}
        for node in self._code.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if node.value in self._by_node:
                    found[node.targets[0].id] = self._by_node[node.value]
            elif isinstance(node, ast.FunctionDef) and node in self._by_node:
                found[node.name] = self._by_node[node]
        return found

    @cached_property
    def _members(self) -> dict[str, Mapped]:
        """Mapped functions kept in attributes, `self.update = jax.pmap(...)`."""
        found = {}
        for node in self._code.nodes:
            if isinstance(node, ast.Assign) and node.value in self._by_node:
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        found[target.attr] = self._by_node[node.value]
        return found

    def _add_call(self, node: ast.Call) -> None:
        how = self._code.dotted(node.func)
        if how in PMAPS | PER_DEVICE | GLOBAL and node.args:
            function = self._code.function(node.args[0])
            self._by_node[node] = Mapped(node, how, function)

    def _add_decorator(self, decorator: ast.expr, function: ast.AST) -> None:
        how = self._code.dotted(decorator)
        if not how and isinstance(decorator, ast.Call):
            how = self._code.dotted(decorator.func)
        if how in PMAPS | PER_DEVICE | GLOBAL:
            mapped = Mapped(decorator, how, function)  # pyright: ignore
            self._by_node[decorator] = self._by_node[function] = mapped
