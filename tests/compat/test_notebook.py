"""Lines of a notebook that are no Python."""

import json

import pytest
from fresh_process import run_lockstep

from lockstep.compat.notebook import is_python, split_commands


@pytest.mark.parametrize(
    ("text", "python", "commands"),
    [
        ("x = 1\ny = 2", "x = 1\ny = 2", []),
        ("%pip install flax\nx = 1", "pass\nx = 1", [1]),
        ("!echo it's (", "pass", [1]),
        ("x?\n?y\nz??", "pass\npass\npass", [1, 2, 3]),
        ("files = !ls\nhere = %pwd", "files = []\nhere = None", [1, 2]),
        ("%time x = f(1)\nn = %time 3", "x = f(1)\nn = 3", [1, 2]),
        ("%timeit -n 1 -r2 f()\n%prun f(1)", "f()\nf(1)", [1, 2]),
        ("%time f(\n%timeit\n!time x", "pass\npass\npass", [1, 2, 3]),
        ("if x:\n    !ls\n    y = 1", "if x:\n    pass\n    y = 1", [2]),
        ("!pip install a \\\n  b\nx = 1", "pass\n\nx = 1", [1, 2]),
        ("%%time\nx = 1", "pass\nx = 1", [1]),
        ("%%bash\nls\nif [", "\n\n", [1]),
        # What only looks like a command:
        ("x = (7\n% 2)", "x = (7\n% 2)", []),
        ("x = (7\n% 2)\n!ls", "x = (7\n% 2)\npass", [3]),
        ("x = 7 \\\n% 2\n!ls", "x = 7 \\\n% 2\npass", [3]),
        ('t = """\n%d\n!x\n"""\n%pip list', 't = """\n%d\n!x\n"""\npass', [5]),
        ("# %pip list\n!ls", "# %pip list\npass", [2]),
        # What is no Python either way stays for the error to name:
        ("x = (\n", "x = (\n", []),
    ],
)
def test_commands_are_taken_out_line_by_line(text, python, commands):
    found, lines = split_commands(text)
    assert found == python
    assert [number for number, _ in lines] == commands
    assert found.count("\n") == text.count("\n")
    if commands:
        assert is_python(found)


def run_cell(tmp_path, *lines):
    """What a notebook of one cell prints."""
    cell = {"cell_type": "code", "metadata": {}, "source": "\n".join(lines)}
    (tmp_path / "guide.ipynb").write_text(json.dumps({"cells": [cell]}))
    done = run_lockstep("run", "guide.ipynb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_display_prints(tmp_path):
    assert run_cell(tmp_path, "%pip list", "display(3, 'four')") == "3\nfour\n"


def test_commands_through_the_shell_are_skipped(tmp_path):
    """As an exported notebook has them."""
    printed = run_cell(
        tmp_path,
        "get_ipython().system('echo no > made.txt')",
        "get_ipython().run_line_magic('matplotlib', 'inline')",
        "get_ipython().magic('pip list')",
        "files = get_ipython().getoutput('ls')",
        "get_ipython().run_cell_magic('bash', '', 'echo no')",
        "get_ipython().run_cell_magic('time', '', 'x = 4')",
        "get_ipython().run_line_magic('time', 'y = x + 1')",
        "print(files, x, y, get_ipython().__class__.__name__)",
    )
    assert printed == "[] 4 5 Shell\n"
    assert not (tmp_path / "made.txt").exists()
