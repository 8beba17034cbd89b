"""What goes wrong in one of several processes: all end soon, and the cause is last."""

import time
from pathlib import Path

import pytest
from fresh_process import run_lockstep

SCRIPT = str(Path(__file__).with_name("topologies") / "faults.py")
BAD_ROW = "ValueError: row 7 is bad"
LOST = "ended without a word: it was killed (out of memory?), crashed"
ALONE = "an array that is gathered after step 5, which all must call together, and"
EARLY = "came to the end of its program after 5 steps"

full = pytest.mark.full


def launch(*arguments: str, options: tuple[str, ...] = (), processes: int = 2):
    """The result of a run, and how long it took."""
    began = time.monotonic()
    options = ("--processes", str(processes), "--simulate", "1", *options)
    result = run_lockstep("run", *options, SCRIPT, *arguments)
    return result, time.monotonic() - began


@pytest.mark.parametrize(
    ("kind", "culprit", "code", "said"),
    [
        ("raise", 1, 1, BAD_ROW),
        pytest.param("raise", 0, 1, BAD_ROW, marks=full),
        ("kill", 1, 137, LOST),
        pytest.param("kill", 0, 137, LOST, marks=full),
        ("early", 1, 70, EARLY),
        pytest.param("early", 0, 70, EARLY, marks=full),
        pytest.param("exit", 1, 3, "left its program by sys.exit(3)", marks=full),
        pytest.param("exit", 0, 3, "left its program by sys.exit(3)", marks=full),
        pytest.param("checkpoints", 1, 1, "checkpoints= of the Trainer", marks=full),
        pytest.param("alone", 1, 70, ALONE, marks=full),
        pytest.param("terminate", 1, 143, "was ended by SIGTERM", marks=full),
        pytest.param("interrupt", 0, 130, "KeyboardInterrupt", marks=full),
    ],
)
def test_all_end_and_both_say_why(kind, culprit, code, said):
    result, seconds = launch(kind, str(culprit))
    assert result.returncode == code, result.stderr
    assert result.stdout.count("step 5: 2") == 2 * (kind != "checkpoints")
    assert f"[{1 - culprit}] the end" not in result.stdout
    lines = result.stderr.splitlines()
    other = [line for line in lines if line.startswith(f"[{1 - culprit}]")]
    assert any(said in line for line in other), result.stderr
    assert said in "\n".join(lines[-2:]) or "SIGKILL" in lines[-1], result.stderr
    assert seconds < 60  # an upper bound on hangs; JAX alone would take 100 s or more


@full
def test_a_hanging_process_is_named_with_its_stack():
    result, _ = launch("hang", "1")
    assert result.returncode == 70
    assert "process 1 (" in result.stderr and "has begun no step for" in result.stderr
    assert "it is at step 5, others are at 6" in result.stderr
    assert "time.sleep(600)" in result.stderr
    assert "hang_timeout_s=4 is over for process 1" in result.stderr.splitlines()[-1]


@full
def test_a_loader_that_hangs_is_named_with_its_stack():
    result, _ = launch("hanging loader", "1")
    assert result.returncode == 70
    last = result.stderr.splitlines()[-1]
    assert "hang_timeout_s=4 is over for process 1" in last and "process 0" not in last
    assert "the thread that reads batches is here" in result.stderr
    assert "time.sleep(599)" in result.stderr


@full
def test_a_child_of_multiprocessing_is_no_process_of_the_run():
    result, _ = launch("spawn", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the child: 0") == 2


@full
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_process_is_named_before_the_heartbeat_ends_the_run(culprit):
    result, _ = launch("stop", str(culprit))
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert f"process {culprit} " in last and "has been silent for" in last
    assert result.stdout.count("step 5: 2") == 2


@full
def test_a_missing_process_is_named_on_time():
    result, seconds = launch("late", "2", processes=3)
    assert result.returncode == 1
    said = "RuntimeError: 2 of 3 processes arrived in 4 s; missing: 2"
    for process in (0, 1):
        assert f"[{process}] {said}" in result.stderr
    assert seconds < 60


@full
def test_a_process_that_is_35_s_late_for_the_first_step_is_waited_for():
    """Gloo gives up after 30 s where nobody waits on the host first."""
    result, seconds = launch("skew", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 10: 2") == 2
    assert "waiting for 30 s for process 1 (" in result.stderr
    assert seconds > 35


@full
def test_a_restart_begins_anew_on_a_fresh_port():
    result, _ = launch("kill", "0", options=("--max-restarts", "1"))
    assert result.returncode == 0, result.stderr
    assert "lockstep run: starting all 2 again, 1 of 1" in result.stderr
    assert result.stdout.count("the end") == 2
