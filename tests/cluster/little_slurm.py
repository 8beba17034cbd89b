"""A real SLURM of two virtual nodes, on the loopback address of this machine.

All of it lies in one folder and runs in the foreground, as children of this process:
munge, the controller, and one daemon for each node. Needs root, and the names of the
nodes in /etc/hosts (tests/cluster/install.sh puts them there).
"""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import portpicker
from cluster.launches import environment
from cluster.patience import until

NODES = ("lockstep-n1", "lockstep-n2")

_SETTINGS = """\
ClusterName=little
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# Credentials that expire soon let a requeued job start again soon.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/controller.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
_PARTITION = "PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"


class LittleSlurm:
    """Runs the clients of SLURM against a cluster that is up."""

    def __init__(self, folder: Path) -> None:
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *command: object) -> str:
        """What a command such as `scontrol show job 1` prints."""
        done = subprocess.run(
            [str(part) for part in command],
            env=environment(**self.variables),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED` ..."""
        shown = self("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)[
            "JobState"
        ]


@contextlib.contextmanager
def little_slurm(folder: Path) -> Iterator[LittleSlurm]:
    """A cluster whose nodes are idle; ended with everything that it has started."""
    _write(folder)
    slurm = LittleSlurm(folder)
    with contextlib.ExitStack() as running:
        munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file")]
        munge += [f"--key-file={folder}/munge.key", f"--log-file={folder}/munge.log"]
        munge += [f"--seed-file={folder}/munge.seed", "--foreground", "--force"]
        _start(running, slurm, folder, "munged", *munge)
        until((folder / "munge.socket").exists, "munged listens")
        _start(running, slurm, folder, "slurmctld", "-D")
        for node in NODES:
            _start(running, slurm, folder, "slurmd", "-D", "-N", node)
        until(lambda: _idle(slurm), "both nodes are idle")
        running.callback(_cancel_all, slurm)
        yield slurm


def _write(folder: Path) -> None:
    host = socket.gethostname()
    text = _SETTINGS.format(
        host=host, folder=folder, controller_port=portpicker.pick_unused_port()
    )
    for name in NODES:
        port = portpicker.pick_unused_port()
        text += _NODE.format(name=name, host=host, port=port)
        (folder / name).mkdir()
    text += _PARTITION.format(names=",".join(NODES))
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(
    running: contextlib.ExitStack, slurm: LittleSlurm, folder: Path, *command: str
) -> None:
    log = running.enter_context(open(folder / f"{command[0]}.log", "ab"))
    daemon = subprocess.Popen(
        command,
        env=environment(**slurm.variables),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    running.callback(_end, daemon)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(10)


def _cancel_all(slurm: LittleSlurm) -> None:
    slurm("scancel", "--signal=KILL", "--full", "--user=root")
    slurm("scancel", "--user=root")  # those that wait, and have nothing to kill
    until(lambda: not slurm("squeue", "--noheader"), "no job is left")


def _idle(slurm: LittleSlurm) -> bool:
    try:
        states = slurm("sinfo", "--noheader", "--Node", "--format=%t").split()
    except AssertionError:  # the controller does not listen yet
        return False
    return states == ["idle", "idle"]
