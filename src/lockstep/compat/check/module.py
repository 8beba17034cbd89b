"""What a rule is given, and what makes a function a rule."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep.compat.check.code import Code
from lockstep.compat.check.findings import Level
from lockstep.compat.check.mapped import MappedFunctions
from lockstep.compat.check.sources import Source
from lockstep.compat.check.uses import uses


class Module(Code):
    """One module of a program.

    Attributes:
        runs_in_pmap: whether it, or a module that imports it, uses `pmap`.
        drives_pmap: whether it, or a module that it imports, uses `pmap`.
    """

    def __init__(self, source: Source):
        super().__init__(source)
        self.runs_in_pmap = self.drives_pmap = bool(self.mapped.pmapped)

    @cached_property
    def uses(self) -> list[tuple[ast.AST, str]]:
        """The dotted names that it uses and counts on."""
        return list(uses(self))

    @cached_property
    def mapped(self) -> MappedFunctions:
        """The functions that are mapped over devices."""
        return MappedFunctions(self)

    @cached_property
    def on_devices(self) -> set[ast.AST]:
        """All nodes that run inside a mapped function."""
        inside: set[ast.AST] = set()
        for mapped in self.mapped.all:
            if mapped.function is not None:
                inside.update(self.reach(mapped.function))
        return inside


Remarks = Iterator[tuple[ast.AST | int, str]]
"""The nodes (or lines) that a rule speaks of, each with a text."""


def line_of(where: ast.AST | int) -> int:
    """The line that a remark is about, as the tree counts them."""
    return where if isinstance(where, int) else getattr(where, "lineno", 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """A question asked of every module.

    Attributes:
        name: what findings are filed under.
        level: how much they matter.
        about: what the rule looks for, in one sentence.
        ask: yields what it finds.
    """

    name: str
    level: Level
    about: str
    ask: Callable[[Module], Remarks]


def rule(level: Level) -> Callable[[Callable[[Module], Remarks]], Rule]:
    """Makes a rule of a function: its name, and what its docstring says."""

    def of(ask: Callable[[Module], Remarks]) -> Rule:
        about = (ask.__doc__ or "").strip().split("\n")[0]
        return Rule(ask.__name__.replace("_", "-"), level, about, ask)

    return of
