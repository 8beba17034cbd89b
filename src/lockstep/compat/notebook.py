"""Notebooks as Python: their code cells, without the lines that are not Python."""

import ast
import io
import json
import linecache
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_COMMAND = re.compile(r"^\s*([%!?]|[\w.]+\s*=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_SHELL = re.compile(r"([\w.]+\s*=\s*)([%!])(.*)")
_MEASURED = re.compile(r"(?:time|timeit|prun)\s+(?:-\w+(?:\s+\d+)?\s+)*(.+)")
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a notebook.

    Attributes:
        number: counts the code cells from 1, as Jupyter's `[n]` after "Run All"; 0
            for a cell of prose.
        text: what stands in the cell.
    """

    number: int
    text: str

    @property
    def is_code(self) -> bool:
        """Whether the cell holds code."""
        return self.number > 0


def read_cells(path: Path) -> list[Cell]:
    """The cells of a notebook file, in order.

    Raises:
        ValueError: the file is not a notebook of format 4.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return list(_numbered(cells))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no notebook of format 4: {error}") from error


def compile_cells(path: str) -> Iterator[CodeType]:
    """The code cells of a notebook, each compiled when the one before has run.

    In tracebacks a cell is called `guide.ipynb[cell 3]`; Python 3.13 shows its lines.

    Raises:
        ValueError: the file is not a notebook of format 4.
    """
    cells = [cell for cell in read_cells(Path(path)) if cell.is_code]
    return (_compiled(f"{path}[cell {c.number}]", c.text) for c in cells)


def names_of_notebooks() -> dict[str, object]:
    """What a notebook finds without importing it."""
    return {"display": display, "get_ipython": Shell}


def display(*values: object, **options: object) -> None:
    """Prints what a notebook would show: stands in for IPython's function."""
    del options
    for value in values:
        print(value)


class Shell:
    """Stands in for IPython's shell: its commands are skipped, as `!` and `%` are."""

    def system(self, command: str) -> None:
        """Skips `!command`."""

    def getoutput(self, command: str) -> list[str]:
        """No lines of output, for `lines = !command`."""
        return []

    def magic(self, command: str) -> None:
        """Skips `%command`, and runs the statement of one that only looks at it."""
        exec(_python_of(f"%{command}"), vars(sys.modules["__main__"]))

    def run_line_magic(self, name: str, line: str) -> None:
        """Skips `%name line`, as `magic` does."""
        self.magic(f"{name} {line}")

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Skips `%%name line`, and runs the cell of one that only looks at it."""
        if f"%%{name}" in _PYTHON_CELLS:
            exec(split_commands(cell)[0], vars(sys.modules["__main__"]))


def _compiled(name: str, text: str) -> CodeType:
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = len(text), None, lines, name
    return compile(split_commands(text)[0], name, "exec", dont_inherit=True)


def _numbered(cells: list[dict]) -> Iterator[Cell]:
    number = 0
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            number += 1
            yield Cell(number, text)
        else:
            yield Cell(0, text)


def split_commands(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Python with `%pip`, `!` and `?` lines made harmless, and those lines.

    A line stays where it is, so that line numbers hold; what was no Python becomes
    `pass`, `%time statement` the statement, and `lines = !ls` an empty list. Text that
    is Python as it stands is left alone.

    Returns:
        The text, and each command as `(line number from 1, line)`.

    Example:
        >>> split_commands("import os\\n%pip install flax\\nos.getpid()")
        ('import os\\npass\\nos.getpid()', [(2, '%pip install flax')])
    """
    lines = text.split("\n")
    if lines[0].startswith("%%") and not lines[0].startswith(_PYTHON_CELLS):
        return "\n".join([""] * len(lines)), [(1, lines[0])]
    if is_python(text):
        return text, []
    commands: list[tuple[int, str]] = []
    goes_on = False
    for index, line in enumerate(lines):
        if goes_on or (_COMMAND.match(line) and _starts_a_statement(lines[:index])):
            commands.append((index + 1, line.strip()))
            indent = line[: len(line) - len(line.lstrip())]
            lines[index] = "" if goes_on else indent + _python_of(line.strip())
            goes_on = line.rstrip().endswith("\\")
    return "\n".join(lines), commands


def _python_of(command: str) -> str:
    """What a line that is no Python does, of what Python can do."""
    target, mark, rest = "", command[:1], command[1:]
    if found := _SHELL.match(command):
        target, mark, rest = found.groups()
    statement = _MEASURED.match(rest) if mark == "%" else None
    if statement and is_python(target + statement[1]):
        return target + statement[1]
    if not target:
        return "pass"
    return target + ("[]" if mark == "!" else "None")


def is_python(text: str) -> bool:
    """Whether Python can parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _starts_a_statement(before: list[str]) -> bool:
    """Whether the next line lies in no string, bracket or continued line."""
    if before and before[-1].rstrip().endswith("\\"):
        return False
    try:
        list(tokenize.generate_tokens(io.StringIO("\n".join(before)).readline))
    except tokenize.TokenError as error:
        return not re.search("multi-line|triple-quoted", str(error))
    except SyntaxError:
        return True
    return True
