"""`initialize`: this process becomes one of several that train together."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import jax

from lockstep.distributed import arrivals, faults, startup
from lockstep.distributed.arrivals import Address, Hello
from lockstep.distributed.detect import Launched, detect
from lockstep.distributed.hub import Hub
from lockstep.distributed.line import Line
from lockstep.distributed.local_gpus import own_devices, shared_gpus
from lockstep.distributed.lookout import Member
from lockstep.distributed.messages import Messages
from lockstep.distributed.scheduling import backend_that_gives_way
from lockstep.distributed.session import (
    Session,
    begin,
    current,
    exchange,
    leave_run,
)
from lockstep.simulation import backend_started

_SHUTDOWN_S = 30


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    bind_address: str | None = None,
    timeout_s: float = 60,
    heartbeat_s: float = 30,
    hang_timeout_s: float | None = None,
    broadcast: bool = True,
    check_data: bool = True,
) -> None:
    """Connect this process with the others of its run; the first line of a script.

    A process that was started alone goes on alone, so the same script runs anywhere.
    What the arguments leave open comes from the launcher: `lockstep run --processes`,
    SLURM (`srun`), `mpirun`, or the variables `LOCKSTEP_COORDINATOR`,
    `LOCKSTEP_NUM_PROCESSES` and `LOCKSTEP_PROCESS_ID` (in an indexed Kubernetes job
    `JOB_COMPLETION_INDEX`). A second call with the same arguments changes nothing.

    From then on an uncaught exception, a killed process or one that leaves early ends
    all processes, and each says why.

    On a CPU under Linux the threads that JAX starts here get the policy SCHED_BATCH,
    with which a small all-reduce between processes takes 0.2 ms instead of 4.

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0.
        local_device_ids: the GPUs of this process, by number; by default its share of
            those that several processes of a machine see.
        bind_address: the address on which process 0 listens; by default that of
            `coordinator_address`, and never all addresses.
        timeout_s: how long to wait for all processes to arrive.
        heartbeat_s: a process whose machine is silent for so long ends the run.
        hang_timeout_s: if no process takes a step for so long, the one that keeps the
            others waiting is named, with its stack, and the run ends. Longer than any
            pause between steps; `None` waits for ever.
        broadcast: where the processes start from different states, that of process 0
            is taken, and this is said; `False` raises.
        check_data: compare host values that all processes must share, and report
            equal first batches.

    Raises:
        RuntimeError: processes are missing or do not fit together, the port is in use,
            or JAX has started before. Every process that arrived gets it.
        ValueError: only some of the numbers are known.

    Example:
        >>> initialize()  # alone
        >>> jax.process_count()
        1
    """
    arguments = dict(locals())
    if _is_begun(arguments) or _is_a_helper():
        return
    launched = _launched(coordinator_address, num_processes, process_id)
    if launched is None:
        return
    _check_first()
    own_ids = local_device_ids or _share_of_gpus(launched)
    address = Address.of(launched.address or "")
    bind = bind_address or address.host
    members, own_end = _meet(launched, address, bind, timeout_s)
    jax.distributed.initialize(
        str(address),
        launched.count,
        launched.index,
        local_device_ids=own_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout_s),
        heartbeat_timeout_seconds=int(heartbeat_s),
        shutdown_timeout_seconds=_SHUTDOWN_S,
        coordinator_bind_address=str(Address(bind, address.port)),
    )
    hub = Hub(members, heartbeat_s, hang_timeout_s) if members else None
    line = Line(own_end, launched.index, launched.count, leave_run, heartbeat_s)
    begin(Session(line, hub, arguments, broadcast, check_data))
    faults.watch(line)
    _compare(launched)


def _is_a_helper() -> bool:
    """Whether a child of `multiprocessing` only reads the script for its functions.

    It has the environment of its parent, and would arrive in its place.
    """
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _is_begun(arguments: dict[str, Any]) -> bool:
    session = current()
    if session is None:
        return False
    before = session.arguments
    if changed := [
        f"{k}={before[k]!r}" for k, v in arguments.items() if v != before[k]
    ]:
        raise RuntimeError(
            "lockstep.initialize was called before with other arguments, "
            f"{', '.join(changed)}: call it once, in the first line of the script"
        )
    return True


def _launched(
    address: str | None, count: int | None, index: int | None
) -> Launched | None:
    """The arguments, completed by what the launcher says."""
    given = (address, count, index)
    found = None if None not in given else detect(os.environ)
    if count is None and found is None:
        if address is None and index is None:
            return None
        raise ValueError(
            f"coordinator_address={address!r} and process_id={index}, and no launcher "
            "tells num_processes: give all three"
        )
    if count is not None and count < 1:
        raise ValueError(f"num_processes={count}: a run has at least 1 process")
    if count == 1:
        return None
    by = "arguments" if found is None else found.by
    count = found.count if count is None and found else count
    index = found.index if index is None and found else index
    address = found.address if address is None and found else address
    if address is None and found is not None:
        address = _address_by_mpi(found)
    if address is None or index is None or count is None:
        raise ValueError(
            f"num_processes={count}, coordinator_address={address!r}, "
            f"process_id={index}: give all three, or start the script with a launcher"
        )
    if not 0 <= index < count:
        raise ValueError(
            f"process_id={index}: of {count} processes it is from 0 to {count - 1}"
        )
    local = (found.local_index, found.local_count) if found else (0, 1)
    return Launched(by, count, index, address, *local)


def _address_by_mpi(found: Launched) -> str:
    """Ask MPI itself where process 0 is."""
    try:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RuntimeError(
            f"{found.by} does not say where process 0 is: install mpi4py, or set "
            "JAX_COORDINATOR_ADDRESS=host:port, or give coordinator_address="
        ) from None
    seen = MPI.COMM_WORLD.Get_size()
    if seen != found.count:  # each process takes itself for number 0
        library = MPI.Get_library_version().partition(",")[0]
        raise RuntimeError(
            f"mpirun started {found.count} processes, and mpi4py sees {seen}: it has "
            f"loaded another MPI ({library}). Set MPI4PY_LIBMPI to the libmpi.so of "
            "this mpirun, or JAX_COORDINATOR_ADDRESS=host:port"
        )
    with socket.create_server(("", 0)) as free:
        own = f"{socket.gethostname()}:{free.getsockname()[1]}"
    return MPI.COMM_WORLD.bcast(own, root=0)


def _share_of_gpus(launched: Launched) -> list[int] | None:
    platforms = {"JAX_PLATFORMS": jax.config.jax_platforms or ""}
    return own_devices(launched, shared_gpus({**os.environ, **platforms}))


def _check_first() -> None:
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jax.distributed.initialize was called before: lockstep.initialize calls "
            "it itself, and first counts who is there; leave yours out"
        )
    if backend_started():
        raise RuntimeError(
            "initialize comes too late: JAX has already started, for this process "
            "alone. Call it before the first JAX operation; jax.devices(), a jnp array "
            "at the top of a module, a key made at import count as one"
        )


def _meet(
    launched: Launched, address: Address, bind: str, timeout_s: float
) -> tuple[list[Member], Messages]:
    """All arrive at process 0: its ends of all lines, and this process's own."""
    hello = Hello(
        launched.index,
        launched.count,
        socket.gethostname(),
        os.getpid(),
        startup.versions(),
    )
    if launched.index:
        line = arrivals.join(address, hello, timeout_s)
        arrivals.wait_for_service(address, timeout_s)
        return [], line
    arrived = arrivals.receive_all(address, bind, hello, timeout_s)
    hub_end, own_end = map(Messages, socket.socketpair())
    members = [Member(0, str(hello), hub_end)]
    for index in sorted(arrived):
        other, messages = arrived[index]
        members.append(Member(index, str(other), messages))
    return members, own_end


def _compare(launched: Launched) -> None:
    """Start the devices everywhere, refuse unequal ones, print the table."""
    everybody = tuple(range(launched.count))
    with backend_that_gives_way():
        facts = startup.facts()
    rows: Any = exchange(facts, everybody, what="its devices")
    startup.check(rows)
    if launched.index == 0:
        text = startup.table(rows, launched.by)
        print(f"{text}\n  {startup.versions_line()}", file=sys.stderr, flush=True)
