"""Findings as text, JSON, SARIF and GitHub annotations."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.compat.check.findings import Finding, Level
from lockstep.compat.check.rules import RULES

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: Sequence[Finding]) -> str:
    """One line a finding, and their number."""
    lines = [f"{f.place}: {f.level} [{f.rule}] {f.text}" for f in findings]
    return "\n".join([*lines, _summary(findings)])


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(f.level for f in findings)
    parts = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in Level]
    files = len({f.path for f in findings})
    return f"{', '.join(parts)} in {files} file{'s' * (files != 1)}"


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects, for programs."""
    rows: list[dict[str, Any]] = []
    for f in findings:
        row: dict[str, Any] = {"rule": f.rule, "level": f.level, "text": f.text}
        row |= {"path": f.path.as_posix(), "line": f.line, "column": f.column}
        rows.append(row | ({"cell": f.cell} if f.cell else {}))
    return json.dumps(rows, indent=2)


def as_github(findings: Sequence[Finding]) -> str:
    """Workflow commands, which GitHub shows beside the lines."""
    commands = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}
    lines = []
    for f in findings:
        place = f"file={_escaped(f.path.as_posix())},line={f.file_line},col={f.column}"
        text = f"cell {f.cell}, line {f.line}: {f.text}" if f.cell else f.text
        title = f"title=lockstep {f.rule}"
        lines.append(f"::{commands[f.level]} {place},{title}::{_escaped(text, '')}")
    return "\n".join(lines)


def _escaped(text: str, also: str = ":,") -> str:
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def as_sarif(findings: Sequence[Finding]) -> str:
    """A log of SARIF 2.1.0, for code scanning."""
    rules = [
        {
            "id": rule.name,
            "shortDescription": {"text": rule.about},
            "defaultConfiguration": {"level": str(rule.level)},
        }
        for rule in RULES
    ]
    driver = {"name": "lockstep check", "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(f) for f in findings]}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(f: Finding) -> dict[str, Any]:
    region = {"startLine": f.file_line, "startColumn": f.column}
    location = {"artifactLocation": {"uri": _uri(f.path)}, "region": region}
    text = f"cell {f.cell}, line {f.line}: {f.text}" if f.cell else f.text
    return {
        "ruleId": f.rule,
        "level": str(f.level),
        "message": {"text": text},
        "locations": [{"physicalLocation": location}],
    }


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else path.as_posix()


REPORTS = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
