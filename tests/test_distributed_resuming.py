"""A run of two processes that is ended from outside goes on as if it had not been."""

import re
from pathlib import Path

import pytest
from fresh_process import run_lockstep

SCRIPT = str(Path(__file__).with_name("topologies") / "resuming.py")

pytestmark = pytest.mark.full


def run(folder, kind, *options, processes=2):
    """The result, and the loss of each step as it was printed last."""
    options = ("--processes", str(processes), "--simulate", "1", *options)
    result = run_lockstep("run", *options, SCRIPT, str(folder), kind)
    losses = re.findall(r"loss (\d+) (\S+)", result.stdout)
    return result, {int(step): value for step, value in losses}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing happens to."""
    result, losses = run(tmp_path_factory.mktemp("well"), "well")
    assert result.returncode == 0, result.stderr
    assert list(losses) == list(range(1, 21))
    return losses


def test_sigterm_to_one_process_saves_the_same_step_on_all(tmp_path, whole):
    result, before = run(tmp_path, "SIGTERM")
    assert result.returncode == 75, result.stderr
    (ended,) = set(re.findall(r"the run ended after step (\d+)", result.stderr))
    assert result.stderr.count(f"SIGTERM: the run ended after step {ended}") == 1
    assert 12 <= int(ended) <= 16 and (tmp_path / ended).is_dir()
    result, after = run(tmp_path, "SIGTERM")
    assert result.returncode == 0, result.stderr
    assert min(after) == int(ended) + 1
    assert before | after == whole  # the same bits


@pytest.mark.parametrize("processes", [1, 4])
def test_goes_on_in_another_number_of_processes(tmp_path, whole, processes):
    """The same batches, and the losses to rounding."""
    result, before = run(tmp_path, "SIGTERM")
    assert result.returncode == 75, result.stderr
    result, after = run(tmp_path, "SIGTERM", processes=processes)
    assert result.returncode == 0, result.stderr
    assert min(after) == max(before) + 1 and max(after) == 20
    for step, loss in after.items():
        assert float(loss) == pytest.approx(float(whole[step]), rel=1e-6)


def test_a_killed_process_and_a_restart_give_the_same_losses(tmp_path, whole):
    result, losses = run(tmp_path, "SIGKILL", "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert "starting all 2 again, 1 of 1" in result.stderr
    # A save that was under way is lost.
    assert re.search(r"the run goes on after step (5|10),", result.stderr)
    assert losses == whole  # the same bits
