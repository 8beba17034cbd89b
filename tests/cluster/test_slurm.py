"""train.py and slurm.sbatch under a real SLURM of two virtual nodes."""

import re
import sys

import pytest
from cluster.launches import TRAIN, Launch, losses_in
from cluster.little_slurm import little_slurm
from cluster.patience import until

pytestmark = pytest.mark.cluster

SBATCH = TRAIN.with_name("slurm.sbatch")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with little_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


class Job:
    """The documented sbatch file under way, on two nodes."""

    def __init__(self, slurm, folder, *options, script=(SBATCH,)):
        self._slurm, self._log = slurm, folder / "log"
        exported = f"--export=ALL,TRAIN={TRAIN}"
        places = [f"--chdir={folder}", f"--output={self._log}", exported]
        number = slurm("sbatch", "--parsable", *places, *options, *script)
        self.number = number.strip()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def until(self, pattern: str, limit_s: float = 40) -> None:
        until(lambda: re.search(pattern, self.log), pattern, limit_s)

    def finish(self) -> str:
        """The state in which the job has ended."""

        def ended() -> bool:
            return not self._slurm("squeue", "--noheader", f"--jobs={self.number}")

        until(ended, f"job {self.number} has ended", 60)
        return self._slurm.state(self.number)


def saved_steps(log: str) -> list[int]:
    """The steps at which process 0 saved because it was asked to stop."""
    return [
        int(n) for n in re.findall(r"^0: .*ended after step (\d+) and is", log, re.M)
    ]


def resumed_steps(log: str) -> list[int]:
    return [
        int(n) for n in re.findall(r"^0: .*goes on after step (\d+), from", log, re.M)
    ]


def test_srun_starts_two_processes_that_train_as_one(slurm, tmp_path, assert_as_alone):
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, TRAIN]
    with Launch(*command, "--run", tmp_path, **slurm.variables) as run:
        assert run.finish() == 0, run.text
    assert "2 processes (SLURM), 2 devices of kind cpu" in run.text
    assert_as_alone(run.text)


def test_sigterm_saves_requeues_and_goes_on(slurm, tmp_path, assert_as_alone):
    job = Job(slurm, tmp_path)
    job.until("step 400: ")
    slurm("scancel", "--signal=TERM", job.number)
    job.until(f"saved: job {job.number} goes back into the queue")
    assert job.finish() == "COMPLETED", job.log
    assert "Restarts=1 " in slurm("scontrol", "show", "job", job.number)
    assert saved_steps(job.log) == resumed_steps(job.log)
    assert 400 <= saved_steps(job.log)[0] < 1200
    assert_as_alone(job.log)


def test_the_time_limit_saves_and_a_plain_scancel_ends(slurm, tmp_path):
    long = ["--steps", 10_000_000]
    job = Job(slurm, tmp_path, "--time=1", "--signal=TERM@50", script=(SBATCH, *long))
    job.until(f"saved: job {job.number} goes back into the queue", limit_s=70)
    job.until("goes on after step")
    before = max(losses_in(job.log), default=0)  # a busy machine is slow to begin
    job.until(f"step {before + 400}: ")
    slurm("scancel", job.number)
    assert job.finish() == "CANCELLED", job.log
    first, second = saved_steps(job.log)
    assert resumed_steps(job.log) == [first] and second > first
    assert job.log.count("goes back into the queue") == 1


def test_a_script_outside_of_srun_is_told_so(slurm, tmp_path):
    alone = f"{sys.executable} {TRAIN}"
    job = Job(slurm, tmp_path, "--ntasks=2", f"--wrap={alone}", script=())
    assert job.finish() == "FAILED"
    assert "this SLURM job has 2 tasks, and the script runs only once" in job.log
