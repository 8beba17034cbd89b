"""train.py under OpenMPI's mpirun."""

import os
import re
import signal
import sys

import pytest
from cluster.launches import TRAIN, Launch, pid_of

pytestmark = pytest.mark.cluster

# In a container one is root and has few cores; all traffic stays on this machine.
HERE = "--allow-run-as-root --oversubscribe --mca oob_tcp_if_include lo".split()
HERE += "--mca btl_tcp_if_include lo".split()


def mpirun(folder) -> Launch:
    script = [TRAIN, "--run", folder]
    return Launch("mpirun", *HERE, "-n", 2, sys.executable, *script)


def test_two_processes_train_as_one(tmp_path, assert_as_alone):
    with mpirun(tmp_path) as run:
        assert run.finish() == 0, run.text
    assert "2 processes (mpirun (OpenMPI)), 2 devices of kind cpu" in run.text
    assert_as_alone(run.text)


def test_a_killed_process_ends_all_and_the_next_run_goes_on(tmp_path, assert_as_alone):
    with mpirun(tmp_path) as killed:
        killed.until("step 400: ")
        os.kill(pid_of(1, killed.text), signal.SIGKILL)
        assert killed.finish() != 0
    assert "on signal 9 (Killed)" in killed.text
    with mpirun(tmp_path) as again:
        assert again.finish() == 0, again.text
    found = re.search(r"the run goes on after step (\d+)", again.text)
    assert found, again.text
    assert 200 <= int(found.group(1)) < 1200
    assert_as_alone(again.text, after=int(found.group(1)))
