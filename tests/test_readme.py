"""The Python blocks of the README run, in their order, as one program."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_python_blocks_run(tmp_path):
    """In a process of its own: a block may ask for simulated devices."""
    blocks = BLOCK.findall(README.read_text())
    assert blocks, "the README shows no Python"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_the_two_commands_are_shown():
    text = README.read_text()
    assert "make train" in text
    assert "make test" in text


def test_links_lead_somewhere():
    """Relative links name files that are there."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert not missing
