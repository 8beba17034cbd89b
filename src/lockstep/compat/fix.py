"""Rewrites what is only spelled otherwise today, in scripts, notebooks, requirements.

What means something else, or has no equal today, is left to a person.
"""

import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.compat.check.module import Module, line_of
from lockstep.compat.check.rules.names import gone_keyword, names_in_table
from lockstep.compat.check.sources import find_files, python_source
from lockstep.compat.notebook import is_python, split_commands
from lockstep.notices import say_once

_DEAD_EXTRA = re.compile(r"(jax\[(?:[\w-]+,\s*)*cuda12)[_-]pip\b")
_MARK = re.compile(r"# lockstep: line (\d+)\r?$")
_BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it
_CELL = re.compile(r"^# lockstep: cell \d+\n", re.MULTILINE)


def fix(paths: Iterable[Path | str]) -> list[Path]:
    """Rewrites files in place; fixing again changes nothing.

    Formatting and everything else in the files stay as they are. Names in code that
    is ready to miss them (`try`, `hasattr`) are left alone.

    Args:
        paths: files and folders, as for the checker.

    Returns:
        The files that changed.

    Raises:
        FileNotFoundError: one of the paths does not exist.
        ImportError: LibCST is not installed.
    """
    changed = []
    for path in find_files(map(Path, paths)):
        before = path.read_bytes()
        try:
            encoding = _encoding_of(path, before)
            text = before.decode(encoding)
            body = text.removeprefix(_BYTE_ORDER_MARK)
            start = text[: len(text) - len(body)]
            after = (start + _fixed(path, body)).encode(encoding)
        except (SyntaxError, UnicodeError, LookupError, RecursionError) as error:
            say_once(f"compat.fix {path}", f"{path} was left as it is: {error}")
            continue
        if after != before:
            path.write_bytes(after)
            changed.append(path)
    return changed


def _encoding_of(path: Path, content: bytes) -> str:
    """UTF-8, or what a module says in its first lines: `# -*- coding: latin-1 -*-`."""
    if path.suffix != ".py":
        return "utf-8"
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return encoding.removesuffix("-sig")


def _fixed(path: Path, text: str) -> str:
    if path.suffix == ".ipynb":
        return _fixed_notebook(text)
    if path.suffix == ".py":
        return fix_python(text)
    return _DEAD_EXTRA.sub(r"\1", text)


def fix_python(text: str) -> str:
    """A module in today's spelling; `%pip` lines may stand in it.

    Example:
        >>> print(fix_python("import jax\\nx = jax.tree_map(abs, -1)  # mine"))
        import jax
        x = jax.tree.map(abs, -1)  # mine
    """
    return _fixed_parts([text])[0]


def _fixed_parts(parts: list[str]) -> list[str]:
    """Parts of one module, such as cells: one imports what another uses."""
    lines: list[str] = []  # what is no Python, by the number in its mark
    texts = [_marked(part, lines) for part in parts]
    whole = "\n".join(f"# lockstep: cell {n}\n{t}" for n, t in enumerate(texts))
    before, *after = _CELL.split(_renamed(whole))
    after[0] = before + after[0]  # an import that had to be added
    after[:-1] = [text.removesuffix("\n") for text in after[:-1]]
    pairs = zip(parts, texts, after, strict=True)
    return [_unmarked(new, lines) if old else part for part, old, new in pairs]


def _marked(text: str, lines: list[str]) -> str:
    """The text as Python, its other lines marked; empty if it is none at all."""
    python, commands = split_commands(text)
    if not is_python(python) or text.startswith("%%") and not python.strip():
        return ""
    marked, old = python.split("\n"), text.split("\n")
    for number, _ in commands:
        marked[number - 1] += f"# lockstep: line {len(lines)}"
        lines.append(_DEAD_EXTRA.sub(r"\1", old[number - 1]))
    return "\n".join(marked)


def _unmarked(text: str, lines: list[str]) -> str:
    new = text.split("\n")
    for index, line in enumerate(new):
        if mark := _MARK.search(line):
            new[index] = lines[int(mark[1])]
    return "\n".join(new)


def _renamed(python: str) -> str:
    try:
        from lockstep.compat.rewrite import rewrite
    except ImportError as error:
        raise ImportError(
            "rewriting needs LibCST: pip install 'lockstep-jax[migrate]'"
        ) from error

    module = Module(python_source(Path(), python))
    found = names_in_table(module)
    places = {(line_of(node), row.old) for node, _, row in found if row.rename}
    clips = {line_of(node) for node, _ in gone_keyword.ask(module)}
    return rewrite(python, places, clips)


def _fixed_notebook(raw: str) -> str:
    try:
        notebook = json.loads(raw)
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        return raw
    before = ["".join(cell["source"]) for cell in cells]
    after = _fixed_parts(before) if before else before
    if after == before:
        return raw
    write = _writer_of(raw, notebook)
    for cell, old, new in zip(cells, before, after, strict=True):
        if new != old:
            is_list = isinstance(cell["source"], list)
            cell["source"] = new.splitlines(keepends=True) if is_list else new
    newline = "\r\n" if "\r\n" in raw else "\n"
    return write(notebook).replace("\n", newline) + raw[len(raw.rstrip()) :]


def _writer_of(raw: str, notebook: dict[str, Any]) -> Callable[[Any], str]:
    """What writes the JSON of a notebook as it was written: indent, blanks, ASCII."""
    found = re.match(r"\{\r?\n([ \t]*)", raw)
    indent = found[1] if found else None
    writers = [
        partial(json.dumps, indent=indent, ensure_ascii=ascii, separators=separators)
        for separators in (None, (",", ":"))
        for ascii in (False, True)
    ]
    text = raw.rstrip().replace("\r\n", "\n")
    return next((w for w in writers if w(notebook) == text), writers[0])
