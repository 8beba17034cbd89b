"""Asks every rule about every file."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.compat.check.findings import Finding, Level
from lockstep.compat.check.module import Module, line_of
from lockstep.compat.check.program import link
from lockstep.compat.check.rules import RULES
from lockstep.compat.check.sources import Source, find_files, read


def check(paths: Iterable[Path | str]) -> list[Finding]:
    """Everything there is to say about the files under `paths`, in their order.

    Scripts, packages, notebooks and lists of requirements are read; nothing of them
    is imported or run.

    Raises:
        FileNotFoundError: one of the paths does not exist.
    """
    modules = [Module(read(file)) for file in find_files(map(Path, paths))]
    link(modules)
    return [finding for module in modules for finding in check_module(module)]


def check_module(module: Module) -> list[Finding]:
    """Everything there is to say about one module of a linked program."""
    found = {*_unread(module.source)}
    for rule in RULES:
        for where, text in rule.ask(module):
            finding = _place(module.source, where, rule.name, rule.level, text)
            if not _is_ignored(module.source, where, rule.name):
                found.add(finding)
    return sorted(found, key=lambda f: (f.cell, f.line, f.column, f.rule))


def _unread(source: Source) -> Iterator[Finding]:
    for line, text in source.unread:
        text = f"not read, {text}: nothing is said about this code"
        yield _place(source, line, "unreadable", Level.WARNING, text)


def _place(
    source: Source, where: ast.AST | int, rule: str, level: Level, text: str
) -> Finding:
    line = source.line(line_of(where))
    return Finding(
        rule=rule,
        level=level,
        text=text,
        line=line.number,
        column=getattr(where, "col_offset", 0) + 1,
        cell=line.cell,
        path=source.path,
        file_line=line.file_line,
    )


def _is_ignored(source: Source, where: ast.AST | int, rule: str) -> bool:
    first = line_of(where)
    last = getattr(where, "end_lineno", first)
    for line in (first, last):
        rules = source.ignored.get(line)
        if rules is not None and (not rules or rule in rules):
            return True
    return False
