"""Several modules as one program: whose code runs inside whose pmap."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.compat.check.module import Module


def link(modules: Iterable[Module]) -> None:
    """Marks what is imported, at any remove, by a module that maps over devices."""
    modules = list(modules)
    todo = [module for module in modules if module.used_by_pmap]
    while todo:
        wanted = list(_imports(todo.pop()))
        for module in modules:
            if not module.used_by_pmap and any(_is(module, path) for path in wanted):
                module.used_by_pmap = True
                todo.append(module)


def _imports(module: Module) -> Iterator[Path]:
    """The end of the path of each file that a module may import, without suffix."""
    folder = module.source.path.resolve().parent
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _path(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder
            for _ in range(node.level - 1):
                base = base.parent
            name = node.module or ""
            from_here = base.joinpath(*filter(None, name.split(".")))
            start = from_here if node.level else _path(folder, name)
            yield start
            yield from (start / alias.name for alias in node.names)


def _path(folder: Path, dotted: str) -> Path:
    """`models` lies beside the script, `package.models` anywhere."""
    parts = dotted.split(".")
    return folder.joinpath(*parts) if len(parts) == 1 else Path(*parts)


def _is(module: Module, path: Path) -> bool:
    own = module.source.path.resolve().with_suffix("")
    if own.name == "__init__":
        own = own.parent
    return own.parts[-len(path.parts) :] == path.parts
