"""The checker: files of all kinds, whole programs, reports, the command."""

import json
from pathlib import Path

import pytest
from fresh_process import run_lockstep

from lockstep.compat.check import REPORTS, Level, check

OLD = "import jax\nx = jax.tree_map(abs, [1])\n"
NEW = "import jax\nx = jax.tree.map(abs, [1])\n"


def notebook(*cells: str, indent: int = 1) -> str:
    """A notebook; a cell that starts with `#!md` is prose."""
    rows = []
    for text in cells:
        kind = "markdown" if text.startswith("#!md") else "code"
        source = text.removeprefix("#!md").splitlines(keepends=True)
        rows.append({"cell_type": kind, "metadata": {}, "source": source})
    whole = {"cells": rows, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=indent)


def places(findings, rule=""):
    """Where each finding is, as it is printed."""
    return [f.place for f in findings if rule in ("", f.rule)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A function that writes files into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = Path(name.replace("__", "/").replace("_DOT_", "."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


class TestFiles:
    def test_a_script(self, here):
        here(train_DOT_py=OLD)
        assert places(check(["train.py"])) == ["train.py:2:5"]

    def test_a_folder_but_not_what_others_put_there(self, here):
        here(
            a__train_DOT_py=OLD,
            a__requirements_DOT_txt="flax\njax[cuda12_pip]==0.4.30\n",
            a__notes_DOT_txt="jax.tree_map",
            a__build__train_DOT_py=OLD,
            a__site_DOT_py=NEW,
        )
        assert places(check(["a"])) == ["a/requirements.txt:2:1", "a/train.py:2:5"]

    def test_a_hidden_folder_is_read_where_it_is_named(self, here):
        here(**{"_DOT_hidden__train_DOT_py": OLD})
        assert not check(["."])
        assert places(check([".hidden"])) == [".hidden/train.py:2:5"]

    def test_a_missing_file_is_an_error(self, here):
        with pytest.raises(FileNotFoundError, match="nothing.py does not exist"):
            check(["nothing.py"])

    def test_lists_of_requirements(self, here):
        here(
            pyproject_DOT_toml='dependencies = ["jax[cuda12_pip]>=0.4"]',
            environment_DOT_yml='- pip:\n  - "jax[cuda11_pip]"\n',
            Dockerfile='FROM python\nRUN pip install "jax[cuda12]"\n',
        )
        assert places(check(["."])) == ["environment.yml:2:1", "pyproject.toml:1:1"]

    def test_python_with_commands_of_a_notebook(self, here):
        here(guide_DOT_py="%pip install flax\n" + OLD + "!ls\n")
        assert places(check(["guide.py"])) == ["guide.py:3:5"]

    def test_code_that_cannot_be_parsed_is_said(self, here):
        here(two_DOT_py="print 'python 2'\n")
        (finding,) = check(["two.py"])
        assert finding.rule == "unreadable"
        assert finding.level is Level.WARNING
        assert finding.line == 1

    def test_nothing_is_run(self, here):
        here(bomb_DOT_py="import jax\nraise SystemExit(jax.tree_map)\n")
        assert places(check(["bomb.py"])) == ["bomb.py:2:18"]

    def test_deep_code_is_read(self, here):
        here(deep_DOT_py="x = " + " + ".join(["1"] * 900) + "\n" + OLD)
        assert places(check(["deep.py"])) == ["deep.py:3:5"]

    def test_code_too_deep_for_python_is_said(self, here):
        here(
            deep_DOT_py="x = " + "(" * 150 + "1" + ")" * 150 + "\n" + "-" * 10**5 + "1"
        )
        (finding,) = check(["deep.py"])
        assert finding.rule == "unreadable"


class TestNotebooks:
    CELLS = (
        "#!md# Title\npmap no longer removes the device axis.",
        "%pip install jax[cuda12_pip]\nimport jax",
        "y = 1\nx = jax.tree_map(abs, [1])",
    )

    def test_lines_are_counted_in_their_cell(self, here):
        here(guide_DOT_ipynb=notebook(*self.CELLS))
        assert places(check(["guide.ipynb"])) == [
            "guide.ipynb:8:1",
            "guide.ipynb:cell 1:1:1",
            "guide.ipynb:cell 2:2:5",
        ]

    def test_the_line_in_the_file_is_known_too(self, here):
        here(guide_DOT_ipynb=notebook(*self.CELLS))
        lines = Path("guide.ipynb").read_text().splitlines()
        by_rule = {f.rule: lines[f.file_line - 1] for f in check(["guide.ipynb"])}
        assert "jax.tree_map" in by_rule["gone-name"]
        assert "cuda12_pip" in by_rule["dead-extra"]

    def test_a_bad_cell_does_not_hide_the_others(self, here):
        here(guide_DOT_ipynb=notebook("import jax", "x = (", "jax.tree_map"))
        assert places(check(["guide.ipynb"])) == [
            "guide.ipynb:cell 2:1:1",
            "guide.ipynb:cell 3:1:1",
        ]

    def test_a_cell_of_another_language_is_no_python(self, here):
        here(guide_DOT_ipynb=notebook("import jax", "%%bash\nls (", "%%time\njax.xmap"))
        assert places(check(["guide.ipynb"])) == ["guide.ipynb:cell 3:2:1"]

    @pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"cells": [{}]}'])
    def test_what_is_no_notebook_is_said(self, here, text):
        here(guide_DOT_ipynb=text)
        (finding,) = check(["guide.ipynb"])
        assert finding.rule == "unreadable"


class TestPrograms:
    """BatchNorm is told of only where its module runs under pmap."""

    MODEL = "import flax.linen as nn\nnorm = nn.BatchNorm()\n"
    TRAIN = "import jax\n{}\nstep = jax.pmap(lambda x: x)\n"

    def found(self):
        return places(check(["."]), "batchnorm-of-one-device")

    @pytest.mark.parametrize(
        "line",
        [
            "from models import Net",
            "import models",
            "from . import models",
            "from .models import Net",
        ],
    )
    def test_a_module_beside_the_script(self, here, line):
        here(train_DOT_py=self.TRAIN.format(line), models_DOT_py=self.MODEL)
        assert self.found() == ["models.py:2:8"]

    def test_a_module_of_a_package_at_one_remove(self, here):
        here(
            train_DOT_py=self.TRAIN.format("from net import layers"),
            net__layers__init_DOT_py="",
            net__layers_DOT_py="from net.norms import norm\n",
            net__norms_DOT_py=self.MODEL,
        )
        assert self.found() == ["net/norms.py:2:8"]

    def test_stacked_state_of_a_module_that_maps(self, here):
        row = "import jax\nimport {}\nrow = jax.tree.map(lambda x: x[0], model.state)\n"
        here(
            train_DOT_py=row.format("steps"),
            other_DOT_py=row.format("math"),
            steps_DOT_py=self.TRAIN,
        )
        assert places(check(["."]), "row-of-stacked-state") == ["train.py:3:7"]

    def test_a_module_that_nobody_maps(self, here):
        here(
            train_DOT_py=self.TRAIN.format("import other"),
            models_DOT_py=self.MODEL,
            sub__other_DOT_py=self.MODEL,
        )
        assert not self.found()


class TestIgnoring:
    @pytest.mark.parametrize(
        "comment", ["ignore", "ignore[gone-name]", "ignore[x, gone-name]"]
    )
    def test_a_line_may_be_left_out(self, here, comment):
        here(train_DOT_py=OLD.replace("])", f"])  # lockstep: {comment}"))
        assert not check(["train.py"])

    def test_of_another_rule_it_is_not(self, here):
        here(train_DOT_py=OLD.replace("])", "])  # lockstep: ignore[old-name]"))
        assert len(check(["train.py"])) == 1


class TestReports:
    @pytest.fixture
    def findings(self, here):
        here(
            train_DOT_py=OLD + "jax.host_id()\n",
            guide_DOT_ipynb=notebook("import jax", "jax.soft_pmap"),
        )
        return check(["train.py", "guide.ipynb"])

    def test_text(self, findings):
        lines = REPORTS["text"](findings).splitlines()
        assert lines[0] == (
            "train.py:2:5: error [gone-name] jax.tree_map was renamed to jax.tree.map"
        )
        assert lines[2].startswith("guide.ipynb:cell 2:1:1: error [gone-name]")
        assert lines[-1] == "2 errors, 0 warnings, 1 note in 2 files"

    def test_text_of_nothing(self):
        assert REPORTS["text"]([]) == "0 errors, 0 warnings, 0 notes in 0 files"

    def test_json(self, findings):
        rows = json.loads(REPORTS["json"](findings))
        assert rows[0] == {
            "rule": "gone-name",
            "level": "error",
            "text": "jax.tree_map was renamed to jax.tree.map",
            "path": "train.py",
            "line": 2,
            "column": 5,
        }
        assert rows[2]["cell"] == 2

    def test_github(self, findings):
        lines = REPORTS["github"](findings).splitlines()
        assert lines[0] == (
            "::error file=train.py,line=2,col=5,title=lockstep gone-name::"
            "jax.tree_map was renamed to jax.tree.map"
        )
        assert lines[1].startswith("::notice file=train.py,line=3")
        assert "::cell 2, line 1: jax.soft_pmap is gone" in lines[2]

    def test_github_escapes_what_would_end_a_command(self, here):
        here(**{"a,b_DOT_py": OLD})
        assert REPORTS["github"](check(["."])).startswith("::error file=a%2Cb.py,line")

    def test_sarif(self, findings):
        log = json.loads(REPORTS["sarif"](findings))
        assert log["version"] == "2.1.0"
        (run,) = log["runs"]
        rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
        for result in run["results"]:
            assert result["ruleId"] in rules
            assert result["level"] in ("error", "warning", "note")
            (location,) = result["locations"]
            place = location["physicalLocation"]
            assert place["region"]["startLine"] >= 1
            assert place["artifactLocation"]["uri"] in ("train.py", "guide.ipynb")


class TestCommand:
    def test_exits_with_1_where_something_is_gone(self, here, tmp_path):
        here(train_DOT_py=OLD)
        done = run_lockstep("check", "train.py", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "train.py:2:5: error [gone-name]" in done.stdout

    def test_exits_with_0_where_nothing_is(self, here, tmp_path):
        here(train_DOT_py=NEW + "step = jax.pmap(abs)\njax.host_id()\n")
        done = run_lockstep("check", "train.py", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert {row["level"] for row in json.loads(done.stdout)} == {"note"}

    def test_two_kinds_of_report_are_an_error_of_use(self, here, tmp_path):
        here(train_DOT_py=OLD)
        done = run_lockstep("check", "train.py", "--json", "--sarif", cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout
        assert "--json and --sarif: one report at a time" in done.stderr

    def test_fixes_first(self, here, tmp_path):
        here(train_DOT_py=OLD)
        done = run_lockstep("check", "--fix", ".", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "rewrote train.py" in done.stderr
        assert (tmp_path / "train.py").read_text() == NEW

    def test_a_missing_path_is_an_error_of_use(self, here, tmp_path):
        done = run_lockstep("check", "nothing.py", cwd=tmp_path)
        assert done.returncode == 2
        assert "nothing.py" in done.stderr

    def test_runs_an_old_script_under_compat(self, here, tmp_path):
        here(old_DOT_py="from jax.config import config\n" + OLD + "print(x)\n")
        done = run_lockstep("run", "--compat", "old.py", cwd=tmp_path)
        assert done.stdout == "[1]\n", done.stderr
        assert run_lockstep("run", "old.py", cwd=tmp_path).returncode == 1

    def test_runs_an_old_notebook_under_compat(self, here, tmp_path):
        cells = (
            "#!md# Doubling",
            '%pip install "jax[cuda12_pip]"\nimport jax\nimport jax.numpy as jnp',
            "%%bash\necho no",
            "x = jnp.arange(jax.device_count())\ny = jax.pmap(lambda v: v * 2)(x)",
            "if True:\n    !ls\n    print(jax.tree_map(lambda v: v.tolist(), y))",
        )
        here(guide_DOT_ipynb=notebook(*cells))
        command = "run", "--simulate", "4", "--compat", "guide.ipynb"
        done = run_lockstep(*command, cwd=tmp_path)
        assert done.stdout == "[0, 2, 4, 6]\n", done.stderr

    def test_an_error_in_a_notebook_names_the_cell_and_the_line(self, here, tmp_path):
        here(guide_DOT_ipynb=notebook("x = 1", "#!mdtext", "y = 2\nraise KeyError(x)"))
        done = run_lockstep("run", "guide.ipynb", cwd=tmp_path)
        assert done.returncode == 1
        assert 'guide.ipynb[cell 2]", line 2' in done.stderr

    def test_a_broken_notebook_does_not_start(self, here, tmp_path):
        here(guide_DOT_ipynb="{}")
        done = run_lockstep("run", "guide.ipynb", cwd=tmp_path)
        assert done.returncode == 2
        assert "no notebook of format 4" in done.stderr

    def test_draws_the_random_numbers_of_the_era(self, here, tmp_path):
        here(
            draw_DOT_py="import jax\n"
            "print(float(jax.random.normal(jax.random.PRNGKey(0), (1,))[0]))\n"
        )
        done = run_lockstep("run", "--compat", "--era-random", "draw.py", cwd=tmp_path)
        assert done.stdout.startswith("-0.20584"), done.stderr
