"""A launched program sees what it sees under `python`, and ends as it ends there."""

import os
import sys

import pytest
from fresh_process import run_lockstep, run_python

from lockstep import launch
from lockstep.launch import CannotStart, Program

WHAT_A_PROGRAM_SEES = """
'''The docstring.'''
import atexit, multiprocessing, os, pickle, sys

class Config:
    pass

def child():
    print("child", __name__, flush=True)

def last_words():
    print("bye from", Config.__name__)

if __name__ == "__main__":
    import neighbour
    atexit.register(last_words)
    print(sys.argv, sys.path[0], neighbour.WORD)
    print(__name__, __doc__, __file__, __package__, __spec__ and __spec__.name)
    print(sys.modules["__main__"].Config is Config, sorted(os.listdir(".")))
    print(pickle.loads(pickle.dumps(Config)) is Config, type(__loader__).__name__)
    spawn = multiprocessing.get_context("spawn").Process(target=child)
    spawn.start()
    spawn.join()
    print(spawn.exitcode, flush=True)
    sys.exit(3)
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a script, a module in it, and a package that can be run."""
    scripts = tmp_path / "scripts"
    package = tmp_path / "package"
    for folder in (scripts, package):
        folder.mkdir()
        (folder / "neighbour.py").write_text("WORD = 'found'")
    (tmp_path / "neighbour.py").write_text("WORD = 'found at the top'")
    (scripts / "train.py").write_text(WHAT_A_PROGRAM_SEES)
    (package / "__init__.py").write_text("print('package')")
    (package / "__main__.py").write_text("print(__name__, __package__, __file__)")
    (package / "train.py").write_text(WHAT_A_PROGRAM_SEES)
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        ["scripts/train.py", "--lr", "3e-4", "--help"],
        ["-m", "package.train", "--lr", "3e-4", "-m"],
        ["-m", "package", "argument"],
    ],
)
def test_a_program_sees_what_python_shows_it(project, program):
    python = run_python(*program, cwd=project)
    ours = run_lockstep("run", *program, cwd=project)
    assert python.stdout, python.stderr
    assert ours.stdout == python.stdout
    assert ours.stderr == python.stderr == ""
    assert ours.returncode == python.returncode


@pytest.mark.parametrize(
    "script",
    [
        "def step():\n    return 1 / 0\n\nstep()",
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
        "x = 1\nif x:\nprint(x)",
        "import sys\nsys.exit('no data')",
        "import sys\nsys.exit()",
        "raise SystemExit(7)",
        "import sys\nsys.excepthook = lambda *e: print('hook', e)\nraise KeyError(1)",
        "import no_such_module_at_all",
        "raise EOFError('end')",
    ],
)
def test_a_program_ends_as_under_python(tmp_path, script):
    path = tmp_path / "train.py"
    path.write_text(script)
    python, ours = run_python(str(path)), run_lockstep("run", str(path))
    assert ours.returncode == python.returncode
    assert hide_addresses(ours.stdout) == hide_addresses(python.stdout)
    assert ours.stderr == python.stderr


def hide_addresses(text):
    return text.split(" at 0x")[0]


def test_an_interrupt_is_the_shells_130(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise KeyboardInterrupt")
    result = run_lockstep("run", str(path))
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_an_import_error_inside_a_module_is_the_modules_own(project):
    (project / "package/__init__.py").write_text("import no_such_module_at_all")
    result = run_lockstep("run", "-m", "package.train", cwd=project)
    assert result.returncode == 1
    trace = result.stderr.splitlines()
    assert trace[1] == f'  File "{project}/package/__init__.py", line 1, in <module>'
    assert trace[-1] == "ModuleNotFoundError: No module named 'no_such_module_at_all'"


@pytest.fixture
def like_a_process(monkeypatch, tmp_path):
    """Puts back what a launch changes for good."""
    monkeypatch.setattr(sys, "argv", ["lockstep"])
    monkeypatch.setattr(sys, "path", ["/launcher", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "module", "message"),
    [
        ("nope.py", False, "cannot read nope.py: No such file or directory"),
        ("folder", False, "cannot read folder: Is a directory"),
        ("nope", True, "no module named nope"),
        ("nope.deep", True, "no module named nope.deep"),
        ("bare", True, "no module named bare.__main__"),
        ("space", True, "no module named space.__main__"),
        ("_json", True, "module _json has no Python code to run"),
        ("a..b", True, "no module named a..b"),
    ],
)
def test_says_what_cannot_be_started(like_a_process, target, module, message):
    (like_a_process / "folder").mkdir()
    (like_a_process / "space").mkdir()
    (like_a_process / "bare").mkdir()
    (like_a_process / "bare/__init__.py").touch()
    with pytest.raises(CannotStart) as error:
        launch.run(Program(target, module=module))
    assert str(error.value) == message


def test_returns_when_the_program_ends(like_a_process):
    (like_a_process / "train.py").write_text("import sys; sys.seen = sys.argv")
    launch.run(Program("train.py", ("--lr", "1")))
    assert sys.seen == ["train.py", "--lr", "1"]  # type: ignore[attr-defined]
    assert sys.path[0] == str(like_a_process)


# --- simulated devices -------------------------------------------------------------

COUNTS = """
import os
os.environ["JAX_ENABLE_X64"] = "1"  # read when JAX is imported, so it must not be yet
import jax
print(jax.device_count(), jax.default_backend(), jax.config.jax_enable_x64)
"""
CHOOSES_ITSELF = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""


def test_a_script_sees_the_simulated_devices(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(COUNTS)
    flags = "--xla_force_host_platform_device_count=2"
    result = run_lockstep("run", "--simulate", "5", str(path), XLA_FLAGS=flags)
    assert result.stdout == "5 cpu True\n"
    assert result.stderr.startswith("simulating 5 devices, not the 2 that XLA_FLAGS")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_option_the_environment_decides(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(COUNTS)
    flags = "--xla_force_host_platform_device_count=2"
    result = run_lockstep("run", str(path), XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert result.stdout == "2 cpu True\n"


def test_a_script_that_chooses_itself_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CHOOSES_ITSELF)
    result = run_lockstep("run", "--simulate", "5", str(path))
    assert result.stdout == "3\n"
    assert result.stderr.startswith(
        "the program ran on 3 cpu devices, not on the 5 simulated ones"
    )


def test_a_script_without_jax_costs_no_jax(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import os, sys\nprint('jax' in sys.modules)")
    result = run_lockstep("run", "--simulate", "5", str(path))
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_simulated_devices_that_are_there_change_nothing():
    before = dict(os.environ)
    with launch.simulated(8):
        pass
    assert dict(os.environ) == before


def test_too_late_to_simulate():
    with pytest.raises(RuntimeError, match="comes too late"), launch.simulated(4):
        pass
