"""Which process this is, by the environment that a launcher left.

Pure functions of a mapping of variables; nothing is imported, asked or started.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_FIRST_PORT, _PORTS = 61440, 4096  # above the ports that Linux gives out by itself


@dataclass(frozen=True)
class Launched:
    """What a launcher says about this process.

    Attributes:
        by: the launcher, for messages.
        count: processes of the run.
        index: the number of this one.
        address: `host:port` of process 0, or `None` where the variables do not tell.
        local_index: the number of this process among those on its machine.
        local_count: how many processes of the run its machine has.
    """

    by: str
    count: int
    index: int
    address: str | None
    local_index: int = 0
    local_count: int = 1


def detect(environ: Mapping[str, str]) -> Launched | None:
    """Who started this process as one of several; `None` where nobody did.

    Raises:
        RuntimeError: the variables of a launcher contradict themselves, or show that
            the script of an sbatch job runs outside srun.

    Example:
        >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[01-02]"}
        >>> slurm |= {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
        >>> detect(slurm).address
        'a01:61447'
        >>> detect({}) is None
        True
    """
    for launcher in (_lockstep, _openmpi, _slurm, _mpich):
        found = launcher(environ)
        if found is not None:
            break
    else:
        return None
    if not 0 <= found.index < found.count:
        raise RuntimeError(
            f"{found.by} says that this is process {found.index} of {found.count}: "
            f"the numbers go from 0 to {found.count - 1}"
        )
    if found.count == 1:
        return None
    if "LOCKSTEP_NUM_PROCESSES" in environ:
        return found  # JAX's variables are for launchers that choose no address
    if address := environ.get("JAX_COORDINATOR_ADDRESS"):
        found = replace(found, address=address)
    if found.address and (port := environ.get("JAX_COORDINATOR_PORT")):
        host = found.address.rpartition(":")[0]
        found = replace(found, address=f"{host}:{port}")
    return found


def _lockstep(environ: Mapping[str, str]) -> Launched | None:
    """`lockstep run --processes`, or the same variables in a manifest.

    An indexed job of Kubernetes numbers its pods by itself.
    """
    count = _number(environ, "LOCKSTEP_NUM_PROCESSES")
    if count is None:
        return None
    names = ("LOCKSTEP_PROCESS_ID", "JOB_COMPLETION_INDEX")
    index = next((n for n in (_number(environ, v) for v in names) if n is not None), 0)
    own = "LOCKSTEP_PROCESS_ID" in environ
    if not own and "JOB_COMPLETION_INDEX" not in environ and count > 1:
        raise RuntimeError(
            f"LOCKSTEP_NUM_PROCESSES={count}, and nothing says which process this is: "
            "set LOCKSTEP_PROCESS_ID (an indexed Kubernetes job sets "
            "JOB_COMPLETION_INDEX)"
        )
    local = "LOCKSTEP_LOCAL_COUNT" in environ
    return Launched(
        environ.get("LOCKSTEP_STARTED_BY", "lockstep run") if own else "Kubernetes",
        count,
        index,
        environ.get("LOCKSTEP_COORDINATOR"),
        local_index=index if local else 0,
        local_count=_number(environ, "LOCKSTEP_LOCAL_COUNT") or 1,
    )


def _openmpi(environ: Mapping[str, str]) -> Launched | None:
    """`mpirun` of OpenMPI 4 and 5."""
    count = _number(environ, "OMPI_COMM_WORLD_SIZE")
    index = _number(environ, "OMPI_COMM_WORLD_RANK")
    if count is None or index is None:
        return None
    local_count = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    # Both say where mpirun runs, and process 0 is taken to be there: 4 by an address,
    # `10092.0;tcp://10.0.0.5:41555`, and 5 by a name, `prterun-node1-4711@1`.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    space = environ.get("PMIX_NAMESPACE", "")
    job = uri.partition(".")[0] or space
    here = re.search(r"tcp://([^,:;]+)", uri) or re.match(r"prterun-(.+)-\d+@", space)
    host = "127.0.0.1" if local_count == count else here and here.group(1)
    return Launched(
        "mpirun (OpenMPI)",
        count,
        index,
        f"{host}:{_port(job)}" if host else None,
        local_index=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        local_count=local_count,
    )


def _mpich(environ: Mapping[str, str]) -> Launched | None:
    """`mpirun` of MPICH and Intel MPI; only mpi4py can tell where process 0 is."""
    count, index = _number(environ, "PMI_SIZE"), _number(environ, "PMI_RANK")
    if count is None or index is None:
        return None
    local_index = _number(environ, "MPI_LOCALRANKID") or 0
    local_count = _number(environ, "MPI_LOCALNRANKS") or 1
    return Launched("mpirun (PMI)", count, index, None, local_index, local_count)


def _slurm(environ: Mapping[str, str]) -> Launched | None:
    """`srun`, in an sbatch script or at the prompt."""
    if "SLURM_JOB_ID" not in environ:
        return None
    count = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    nodes = environ.get("SLURM_STEP_NODELIST")
    if nodes is None:
        if count > 1 and "SLURM_STEP_ID" not in environ:
            raise RuntimeError(
                f"this SLURM job has {count} tasks, and the script runs only once, "
                "outside of srun: start it with `srun python train.py` in the sbatch "
                "script (or ask for --ntasks=1)"
            )
        return None
    job = int(environ["SLURM_JOB_ID"])
    for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"):  # a port for each attempt
        job += 257 * (_number(environ, name) or 0)
    local_index = _number(environ, "SLURM_LOCALID") or 0
    index = _number(environ, "SLURM_PROCID") or 0
    return Launched(
        "SLURM",
        count,
        index,
        f"{first_host(nodes)}:{_FIRST_PORT + job % _PORTS}",
        local_index=local_index,
        local_count=_tasks_on_node(environ),
    )


def first_host(nodes: str) -> str:
    """The first name in a list of hosts as SLURM writes it.

    Example:
        >>> first_host("gpu[07,09-12],big3"), first_host("r[1-2]n[1-4]")
        ('gpu07', 'r1n1')
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    name = first.group(0) if first else nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", name)


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """This node's entry in `2(x3),1`; nodes in the order of the list."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for entry in re.finditer(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(entry.group(1))] * int(entry.group(2) or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    return counts[min(node, len(counts) - 1)]


def _port(job: str) -> int:
    digits = re.findall(r"\d+", job)
    return _FIRST_PORT + sum(map(int, digits)) % _PORTS


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name):
            return _checked(name, environ[name])
    return None


def _checked(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{name}={text!r} is no whole number") from None
