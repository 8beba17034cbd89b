"""docs/migrate.md: its blocks run, and it names every rule of the checker."""

import re
from pathlib import Path

import pytest
from fresh_process import run_python

from lockstep.compat.check.findings import Level
from lockstep.compat.check.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_the_blocks_run_as_one_program(tmp_path):
    """Their assertions compare the training on every rung of the ladder."""
    blocks = BLOCK.findall(PAGE.read_text())
    assert sum("assert" in block for block in blocks) >= 4
    done = run_python("-W", "error", "-c", "\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_rule_is_named_under_its_level():
    section = PAGE.read_text().split("## `lockstep check`")[1].split("\n## ")[0]
    for level in Level:
        (item,) = re.findall(
            rf"- \*\*{level}\*\*: (.*?)(?:;\n|\.\n)", section, re.DOTALL
        )
        named = set(re.findall(r"`([a-z-]+)`", item))
        assert named == {rule.name for rule in RULES if rule.level is level}


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE.read_text())
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
