"""Several modules as one program: whose code runs inside whose pmap."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.compat.check.module import Module


def link(modules: Iterable[Module]) -> None:
    """Tells each module whether it, or one that it works with, uses `pmap`.

    What a mapping module imports, at any remove, runs inside its `pmap`; what imports
    a mapping module drives it.
    """
    modules = list(modules)
    imports = {module: _imported(module, modules) for module in modules}
    todo = [module for module in modules if module.runs_in_pmap]
    while todo:
        for module in imports[todo.pop()]:
            if not module.runs_in_pmap:
                module.runs_in_pmap = True
                todo.append(module)
    for module in modules:
        if any(imported.mapped.pmapped for imported in imports[module]):
            module.drives_pmap = True


def _imported(module: Module, modules: list[Module]) -> list[Module]:
    wanted = list(_imports(module))
    return [m for m in modules if m is not module and any(_is(m, p) for p in wanted)]


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
