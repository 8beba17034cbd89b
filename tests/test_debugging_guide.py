"""docs/debugging.md: its programs run, its commands too, and print what it shows.

`python tests/test_debugging_guide.py` writes what they print into the page.
"""

import re
import tempfile
from pathlib import Path

import pytest
from fresh_process import run_lockstep, run_python

PAGE = Path(__file__).parents[1] / "docs" / "debugging.md"
BLOCK = re.compile(
    r"^```(python|console)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S
)
MARK = "-- end of block --"


def blocks(kind, text=None):
    """The blocks of one kind, with what the page shows as their output."""
    found = BLOCK.findall(PAGE.read_text() if text is None else text)
    return [(code, shown) for name, code, shown in found if name == kind]


def without_times(text):
    """Seconds differ from run to run, and so do the spaces at the end of a line."""
    text = re.sub(r"\d+\.\d+ s\b", "N s", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def programs():
    """The blocks that are one program after the other."""
    return [pair for pair in blocks("python") if not pair[0].startswith("# train.py")]


def outputs_of_programs(folder):
    """What each of them prints, notices included, on eight simulated devices."""
    codes = [code + f"print({MARK!r}, flush=True)\n" for code, _ in programs()]
    (folder / "page.py").write_text("\n".join(codes))
    done = run_python(
        "-c",
        "import sys; sys.stderr = sys.stdout; import runpy; runpy.run_path('page.py')",
        cwd=folder,
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(MARK + "\n")[:-1]


def outputs_of_commands(folder):
    """What the commands print, one after the other, with the page's own script."""
    script = next(c for c, _ in blocks("python") if c.startswith("# train.py"))
    (folder / "train.py").write_text(script)
    results = []
    for command, _ in blocks("console"):
        program, *arguments = command.strip().removeprefix("$ ").split()
        assert program == "lockstep"
        done = run_lockstep(*arguments, cwd=folder)
        results.append(done.stdout)
    return results


@pytest.mark.full
def test_the_programs_print_what_the_page_shows(tmp_path):
    got = outputs_of_programs(tmp_path)
    want = [shown for _, shown in programs()]
    assert [without_times(text) for text in got] == [without_times(t) for t in want]


@pytest.mark.full
def test_the_commands_print_what_the_page_shows(tmp_path):
    got = outputs_of_commands(tmp_path)
    want = [shown for _, shown in blocks("console")]
    assert [without_times(text) for text in got] == [without_times(t) for t in want]


def test_links_lead_somewhere():
    text = PAGE.read_text()
    heads = re.findall(r"^## (.*)$", text, re.M)
    anchors = {head.lower().replace(" ", "-") for head in heads}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert links and set(links) == anchors


def write_outputs():
    """Bring the page up to date."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as other:
        programs = iter(outputs_of_programs(Path(first)))
        commands = iter(outputs_of_commands(Path(other)))

    def fill(match):
        kind, code = match[1], match[2]
        if code.startswith("# train.py"):
            return match[0]
        output = next(programs if kind == "python" else commands).rstrip()
        shown = f"\n\n```text\n{output}\n```" if output else ""
        return f"```{kind}\n{code}```{shown}"

    PAGE.write_text(BLOCK.sub(fill, PAGE.read_text()))


if __name__ == "__main__":
    write_outputs()
