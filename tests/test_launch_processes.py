"""`lockstep run --processes`: environment, output, exit codes, signals, restarts."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import run_lockstep

from lockstep.processes import child, supervise
from lockstep.processes.output import Output

FIRST_LINES = """
import os, sys
me = os.environ["LOCKSTEP_PROCESS_ID"]
names = ("COORDINATOR", "NUM_PROCESSES", "LOCAL_COUNT", "RESTART")
values = [os.environ["LOCKSTEP_" + name] for name in names]
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script that knows its number as `me`, and gives its path."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(FIRST_LINES + text)
        return str(path)

    return write


def run(*options, **environment):
    return run_lockstep("run", "--processes", *options, **environment)


def test_each_process_sees_its_place_and_its_arguments(script):
    path = script(
        """
import jax
print(me, values[1:], sys.argv[1:], jax.device_count(), sys.stdin.read() == "")
print("to stderr", file=sys.stderr)
"""
    )
    result = run("3", "--simulate", "2", path, "--processes", "9", "-m")
    assert result.returncode == 0, result.stderr
    expected = [
        f"[{i}] {i} ['3', '3', '0'] ['--processes', '9', '-m'] 2 True" for i in range(3)
    ]
    assert sorted(result.stdout.splitlines()) == expected
    assert sorted(result.stderr.splitlines()) == [f"[{i}] to stderr" for i in range(3)]


def test_options_of_run_go_to_each_process(script):
    path = Path(script("import jax; print(hasattr(jax, 'device_put_replicated'), me)"))
    options = ("run", "--processes", "2", "--compat", "-m", path.stem)
    result = run_lockstep(*options, cwd=path.parent)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] True 0", "[1] True 1"]


def test_one_process_is_a_run_like_any_other(script):
    assert run("1", script("print(values[1:])")).stdout == "[0] ['1', '1', '0']\n"


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("sys.exit(3 * (me == '1'))", 3, "process 1 of 2 failed with exit code 3"),
        ("if me == '0': raise ValueError('bad')", 1, "ValueError: bad"),
        ("if me == '1': os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
        ("os._exit(70 if me == '0' else 4)", 4, "failed with exit code 4"),
        ("sys.exit(75)", 75, ""),
    ],
)
def test_the_code_is_that_of_the_first_to_fail(script, text, code, last):
    result = run("2", script(text))
    assert result.returncode == code, result.stderr
    assert last in ("\n" + result.stderr).splitlines()[-1]


@pytest.mark.full
def test_the_first_failure_ends_those_who_do_not_notice(script):
    result = run("2", script("import time\nif me == '0': sys.exit(5)\ntime.sleep(99)"))
    assert result.returncode == 5
    assert result.stderr.splitlines()[-1].endswith("failed with exit code 5")


def test_a_restart_has_a_fresh_port_and_says_which_it_is(script):
    path = script("print(*values)\nif values[-1] != '1': sys.exit(6)")
    result = run("1", "--max-restarts", "3", path)
    assert result.returncode == 0, result.stderr
    first, second = (line.split() for line in result.stdout.splitlines())
    assert first[1] != second[1] and (first[-1], second[-1]) == ("0", "1")
    assert "starting all 1 again, 1 of 3" in result.stderr


def test_restarts_are_counted(script):
    result = run("1", "--max-restarts", "1", script("print('x'); sys.exit(6)"))
    assert result.returncode == 6 and result.stdout == "[0] x\n[0] x\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_signals_are_passed_on(script, number, code):
    path = script(
        """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ready", flush=True)
time.sleep(99)
"""
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", "--processes", "2", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(supervise.__file__).parents[2])},
    )
    with launcher:
        for _ in range(2):
            assert "ready" in launcher.stdout.readline()
        launcher.send_signal(number)
        assert launcher.wait(60) == code


def test_children_and_theirs_die_with_their_launcher(script):
    path = script(
        "import time\nif child := os.fork(): print(os.getpid(), child)\ntime.sleep(99)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", "--processes", "1", path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(supervise.__file__).parents[2])},
    )
    with launcher:
        parent, child = map(int, launcher.stdout.readline().split()[1:])
        assert is_running(parent) and is_running(child)
        launcher.kill()
        launcher.wait(60)
        while is_running(parent) or is_running(child):
            pass


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_environment_of_a_child():
    found = child.environment({"HOME": "/"}, 1, 2, 4711, 3)
    assert found["HOME"] == "/" and found["LOCKSTEP_COORDINATOR"] == "127.0.0.1:4711"
    assert found["LOCKSTEP_RESTART"] == "3" and found["LOCKSTEP_PROCESS_ID"] == "1"


def test_ports_are_new_each_time():
    assert len({child.free_port() for _ in range(4)}) > 1


class Kept(io.BytesIO):
    """Keeps its value."""


def shown(out=b"", err=b""):
    to_out, to_err = Kept(), Kept()
    output = Output(to_out, to_err)
    output.follow(0, io.BytesIO(out), io.BytesIO(err))
    output.finish()
    return output, to_out.getvalue(), to_err.getvalue()


def test_reports_of_native_code_are_kept_back():
    native = b"E1129 10:00:00.5 1 agent.cc:1] Polled an error\n    @ 0x7f abort\n"
    output, out, err = shown(b"[Gloo] Rank 0 is connected\nloss 1", b"a\n" + native)
    assert (out, err) == (b"[0] loss 1\n", b"[0] a\n")
    assert output.cause(0).text == "a"


def test_reports_of_native_code_are_shown_where_nothing_else_says_why():
    to = Kept()
    output = Output(to, to)
    native = b"F1129 10:00:00.5 1 x.cc:1] why\nterminate called\n  what():  bad sizes\n"
    output.follow(0, io.BytesIO(b""), io.BytesIO(native))
    output.finish()
    assert to.getvalue() == b""
    assert output.show_kept(0) == "bad sizes"
    assert b"x.cc:1] why\n" in to.getvalue()


def test_the_line_that_names_the_error_is_the_last():
    error = b"ValueError: bad\n--------------------\nFor simplicity, JAX has removed\n"
    output, _, err = shown(err=error)
    assert output.cause(0).text == "ValueError: bad" and err.count(b"[0]") == 3


@pytest.mark.parametrize(
    ("failed", "killed", "expected"),
    [
        ({0: 1}, set(), 0),
        ({0: 70, 1: 1}, set(), 1),
        ({0: -6, 1: -9}, set(), 1),
        ({0: -6, 1: -9}, {1}, 0),
        ({1: 70, 0: 70}, set(), 1),
        ({2: 5, 0: 1}, set(), 2),
        ({0: 70, 1: -6}, set(), 1),
        ({0: 70, 2: -6}, {2}, 0),
    ],
)
def test_the_culprit(failed, killed, expected):
    assert supervise.culprit(failed, killed) == expected


def test_a_process_that_told_of_another_before_it_aborted_is_no_culprit():
    assert supervise.culprit({0: -6, 1: -6}, set(), told={0}) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: a\nb\n", "RuntimeError: a\nb"),
        ("RuntimeError: a\n" + "b\n" * 6, "b"),
        ("RuntimeError: a\nlockstep: c\n", "lockstep: c"),
        ("  | Group: two\n  +-+-- 1 ---\n    | A: a\n", "| Group: two\n| A: a"),
    ],
)
def test_an_error_of_several_lines_is_the_cause(error, expected):
    trace = "Traceback (most recent call last):\n  File x\n    call()\n"
    output, *_ = shown(err=(trace + error).encode())
    assert output.cause(0).text == expected


@pytest.mark.parametrize(
    "after",
    [b"in every(2, Log) at step 3\n", b"then also: OSError('full')\n", b"WARNING:x\n"],
)
def test_notes_and_warnings_are_no_cause(after):
    output, _, err = shown(err=b"OSError: no space left\n" + after)
    assert output.cause(0).text == "OSError: no space left" and after in err


def test_what_lockstep_told_before_jax_aborted_is_kept():
    err = b"lockstep: process 1 has been silent\nE1129 10:00:00.5 tasks:\n1\n"
    output, _, _ = shown(err=err)
    assert output.cause(0).told == "lockstep: process 1 has been silent"
