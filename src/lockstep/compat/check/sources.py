"""Files as the checker reads them: Python, notebooks, lists of requirements."""

import ast
import fnmatch
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.compat.notebook import Cell, read_cells, split_commands

_REQUIREMENTS = (
    "*requirements*.txt",
    "pyproject.toml",
    "setup.cfg",
    "environment*.yml",
    "environment*.yaml",
    "Dockerfile*",
)
_IGNORE = re.compile(r"lockstep:\s*ignore(?:\[([\w\s,-]*)\])?")
_LEFT_OUT = {"__pycache__", "node_modules", "build", "dist", "site-packages"}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line of the text that is read lies in its file."""

    number: int
    cell: int = 0
    file_line: int = 0


@dataclass(slots=True)
class Source:
    """One file, taken apart.

    Attributes:
        path: the file.
        tree: the syntax tree of its Python; that of a notebook joins all its cells.
        lines: for each line of the tree, from 1 on, where it lies in the file.
        commands: `%pip` and `!` lines, and lines of requirements, with their line.
        prose: comments, docstrings and cells of prose, with their first line.
        unread: what could not be parsed, with the line.
        ignored: the lines with a comment `lockstep: ignore[rule]`, and its rules;
            none means all.
    """

    path: Path
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    lines: list[Line] = field(default_factory=list)
    commands: list[tuple[int, str]] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)
    unread: list[tuple[int, str]] = field(default_factory=list)
    ignored: dict[int, set[str]] = field(default_factory=dict)

    def line(self, number: int) -> Line:
        """Where line `number` of what was read lies in the file."""
        return self.lines[min(max(number, 1), len(self.lines)) - 1]


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files under `paths` that the checker reads; a file named is always read.

    Raises:
        FileNotFoundError: one of the paths does not exist.
    """
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            inside = (p for p in sorted(path.rglob("*")) if _is_wanted(p, path))
            yield from inside
        else:
            raise FileNotFoundError(f"{path} does not exist")


def _is_wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    if any(part in _LEFT_OUT or part.startswith(".") for part in parts):
        return False
    known = path.suffix in (".py", ".ipynb") or _is_requirements(path)
    return known and path.is_file()


def _is_requirements(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in _REQUIREMENTS)


def read(path: Path) -> Source:
    """Reads one file; what cannot be parsed is said in `unread`."""
    if path.suffix == ".ipynb":
        return _read_notebook(path)
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if _is_requirements(path):
        source = Source(path, lines=_own_lines(text))
        source.commands = list(enumerate(text.splitlines(), 1))
        return source
    return python_source(path, text)


def _own_lines(text: str) -> list[Line]:
    return [Line(n, 0, n) for n in range(1, text.count("\n") + 2)]


def python_source(path: Path, text: str) -> Source:
    """A module that has been read; `%pip` lines may stand in it."""
    source = Source(path, lines=_own_lines(text))
    python, source.commands = split_commands(text)
    _parse(source, python)
    return source


def _read_notebook(path: Path) -> Source:
    source = Source(path)
    try:
        cells = read_cells(path)
    except ValueError as error:
        source.lines = [Line(1, 0, 1)]
        source.unread.append((1, str(error)))
        return source
    texts: list[str] = []
    for cell, starts in zip(cells, _json_lines(path, cells), strict=True):
        first = len(source.lines) + 1
        text = cell.text if cell.is_code else "\n" * cell.text.count("\n")
        python, commands = split_commands(text)
        source.commands += [(first + n - 1, line) for n, line in commands]
        if not cell.is_code:
            source.prose.append((first, cell.text))
        elif error := _syntax_error(python):
            source.unread.append((first + (error.lineno or 1) - 1, error.msg))
            python = "\n" * python.count("\n")
        texts.append(python)
        source.lines += _cell_lines(cell, python, starts)
    _parse(source, "\n".join(texts))
    return source


def _cell_lines(cell: Cell, python: str, starts: list[int]) -> Iterator[Line]:
    for n in range(python.count("\n") + 1):
        yield Line(n + 1 if cell.is_code else starts[n], cell.number, starts[n])


def _json_lines(path: Path, cells: list[Cell]) -> list[list[int]]:
    """For each line of each cell, its line in the notebook's JSON, as well as found."""
    raw = path.read_text(encoding="utf-8").splitlines()
    at, found = 0, []
    for cell in cells:
        numbers = []
        for line in cell.text.split("\n"):
            spellings = [json.dumps(line, ensure_ascii=a)[1:-1] for a in (True, False)]
            hits = (
                n for n in range(at, len(raw)) if any(s in raw[n] for s in spellings)
            )
            at = next(hits, at)
            numbers.append(at + 1)
        found.append(numbers)
    return found


def _syntax_error(text: str) -> SyntaxError | None:
    tree = _tree(text)
    return tree if isinstance(tree, SyntaxError) else None


def _tree(text: str) -> ast.Module | SyntaxError:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes: not ours to judge
            return ast.parse(text)
    except SyntaxError as error:
        return error
    except (RecursionError, MemoryError):  # how Python says so differs by version
        return SyntaxError("nested too deeply for this Python")


def _parse(source: Source, python: str) -> None:
    tree = _tree(python)
    if isinstance(tree, SyntaxError):
        source.unread.append((tree.lineno or 1, tree.msg))
        return
    source.tree = tree
    comments = list(_comments(python))
    source.prose += _joined(comments)
    source.prose += _strings(source.tree)
    for line, text in comments:
        if found := _IGNORE.search(text):
            source.ignored[line] = set(re.split(r"[\s,]+", found[1] or "")) - {""}


def _comments(python: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(python).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _joined(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Comments on consecutive lines as one text."""
    block: list[str] = []
    first = 0
    for line, text in comments:
        if block and line != first + len(block):
            yield first, "\n".join(block)
            block = []
        first = first if block else line
        block.append(text)
    if block:
        yield first, "\n".join(block)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and strings that stand alone as comments do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value
