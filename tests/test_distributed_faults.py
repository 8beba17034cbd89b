"""What goes wrong in one of several processes: all end soon, and the cause is last."""

import time
from pathlib import Path

import pytest
from fresh_process import run_lockstep

SCRIPT = str(Path(__file__).with_name("topologies") / "faults.py")
LOST = "ended without a word: it was killed (out of memory?), crashed"
EARLY = "came to the end of its program after 5 steps"
BEFORE = "before all had arrived in lockstep.initialize(), which every process must"

full = pytest.mark.full


def launch(
    *arguments: str, options: tuple[str, ...] = (), processes: int = 2, **environment
):
    """The result of a run, and how long it took."""
    began = time.monotonic()
    options = ("--processes", str(processes), "--simulate", "1", *options)
    result = run_lockstep("run", *options, SCRIPT, *arguments, **environment)
    return result, time.monotonic() - began


def assert_all_say(result, seconds, culprit, code, *said):
    """The exit code, and that the last lines of all name the cause."""
    assert result.returncode == code, result.stderr
    assert "the end" not in result.stdout
    lines = result.stderr.splitlines()
    other = [line for line in lines if line.startswith(f"[{1 - culprit}]")]
    assert any(said[-1] in line for line in other), result.stderr
    ending = "\n".join(lines[-2:])
    assert said[0] in ending or "was ended by SIG" in lines[-1], result.stderr
    assert seconds < 60  # an upper bound on hangs; JAX alone would take 100 s or more


@pytest.mark.parametrize(
    ("kind", "culprit", "code", "said"),
    [
        ("raise", 1, 1, "ValueError: row 7 is bad"),
        pytest.param("raise", 0, 1, "ValueError: row 7 is bad", marks=full),
        ("kill", 1, 137, LOST),
        pytest.param("kill", 0, 137, LOST, marks=full),
        ("early", 1, 70, EARLY),
        pytest.param("early", 0, 70, EARLY, marks=full),
        pytest.param("exit", 1, 3, "left its program by sys.exit(3)", marks=full),
        pytest.param("exit", 0, 3, "left its program by sys.exit(3)", marks=full),
        pytest.param("leave", 1, 3, LOST, marks=full),
        pytest.param("leave with 0", 1, 70, LOST, marks=full),
        pytest.param("abort", 1, 134, LOST, marks=full),
        pytest.param("abort", 0, 134, LOST, marks=full),
        pytest.param("recursion", 1, 1, "RecursionError: maximum", marks=full),
        pytest.param("disk", 1, 1, "No space left on device", marks=full),
        pytest.param("alone", 1, 70, "gathered after step 5, which all", marks=full),
        pytest.param("saves alone", 1, 70, "save of the state after step", marks=full),
        pytest.param(
            "compares alone", 0, 70, "replicas after step 5, which", marks=full
        ),
        pytest.param("twice", 1, 1, "other arguments, timeout_s=30:", marks=full),
        pytest.param("terminate", 1, 143, "was ended by SIGTERM", marks=full),
        pytest.param("own handler", 1, 9, "its program by sys.exit(9)", marks=full),
        pytest.param("interrupt", 0, 130, "KeyboardInterrupt", marks=full),
    ],
)
def test_a_fault_in_a_step(kind, culprit, code, said):
    result, seconds = launch(kind, str(culprit))
    assert_all_say(result, seconds, culprit, code, said)
    assert result.stdout.count("step 5: 2") == 2


@full
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("constant", 1, "RuntimeError: the program of <lambda> differs between"),
        ("shape", 1, "RuntimeError: the form of <lambda>'s arguments differs"),
        ("compile", 130, "KeyboardInterrupt"),
        ("checkpoints", 1, "checkpoints= of the Trainer"),
        ("validation", 70, "has begun a pass over batches (an evaluation?) after step"),
        ("different", 70, "the processes run different programs: process"),
        ("devices", 1, "has 2 devices, and process 0 ("),
    ],
)
def test_a_fault_in_the_program(kind, code, said):
    result, seconds = launch(kind, "1")
    assert_all_say(result, seconds, 1, code, said)


@full
@pytest.mark.parametrize(
    ("kind", "culprit", "said", "how"),
    [
        ("absent", 1, "process 1 of 2 came to its end", "came to its end"),
        ("absent", 0, "process 0 of 2 came to its end", "came to its end"),
        ("import", 1, "No module named 'a_module", "failed with exit code 1"),
        ("started", 0, "initialize comes too late", "failed with exit code 1"),
    ],
)
def test_a_process_that_never_arrives(kind, culprit, said, how):
    result, seconds = launch(kind, str(culprit))
    others = f"process {culprit} of 2 {how} {BEFORE}"
    assert_all_say(result, seconds, culprit, 1, said, others)
    assert seconds < 25  # and not the 30 s that initialize waits


@full
def test_a_collective_of_ones_own_that_one_process_makes_alone():
    """Lockstep does not see it; the backend aborts where the sizes differ."""
    result, seconds = launch("own collective", "1")
    assert result.returncode == 134, result.stderr
    assert "collective mismatch" in result.stderr.splitlines()[-1]
    assert LOST in result.stderr and seconds < 60


@full
def test_sigterm_without_the_service_of_jax():
    service = {"JAX_ENABLE_PREEMPTION_SERVICE": "0"}
    result, seconds = launch("terminate", "1", **service)
    assert_all_say(result, seconds, 1, 143, "was ended by SIGTERM")


@full
def test_one_of_four_processes_is_killed():
    result, seconds = launch("kill", "2", processes=4)
    assert result.returncode == 137, result.stderr
    for process in (0, 1, 3):
        lines = [x for x in result.stderr.splitlines() if x.startswith(f"[{process}]")]
        assert any("process 2 (" in x and LOST in x for x in lines), lines
    assert seconds < 60


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
    assert result.returncode == 134, result.stderr
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


def assert_is_waited_for(kind, at_least_s):
    """All steps are taken, and it is said for whom the others wait."""
    result, seconds = launch(kind, "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 10: 2") == 2
    assert "waiting for 30 s for process 1 (" in result.stderr
    assert seconds > at_least_s
    return result


@full
def test_a_process_that_is_35_s_late_for_the_first_step_is_waited_for():
    """Gloo gives up after 30 s where nobody waits on the host first."""
    assert_is_waited_for("skew", 35)


@full
def test_a_process_that_is_slow_in_a_step_is_waited_for_and_named():
    result = assert_is_waited_for("slow", 33)
    assert "(at step 5, and others have begun step 6)" in result.stderr


@full
def test_a_restart_begins_anew_on_a_fresh_port():
    result, _ = launch("kill", "0", options=("--max-restarts", "1"))
    assert result.returncode == 0, result.stderr
    assert "lockstep run: starting all 2 again, 1 of 1" in result.stderr
    assert result.stdout.count("the end") == 2
