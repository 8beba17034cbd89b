"""Processes found in the environment, counted at their arrival, compared by value."""

import atexit
import contextlib
import logging
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

import lockstep as ls
from lockstep import distributed
from lockstep.distributed import (
    agreement,
    arrivals,
    faults,
    local_gpus,
    lookout,
    session,
    startup,
)
from lockstep.distributed.arrivals import Address, Hello
from lockstep.distributed.detect import Launched, detect, first_host
from lockstep.distributed.hub import Hub
from lockstep.distributed.line import Line, ProcessLeft
from lockstep.distributed.lookout import Member
from lockstep.distributed.messages import Messages
from lockstep.placement.row_shares import Shares


def test_one_process_is_the_main_one():
    assert distributed.is_main_process() is True


def test_another_process_is_not(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert distributed.is_main_process() is False


def test_processes_of_one_process():
    found = distributed.processes()
    assert found == distributed.Processes(0, 1, local_devices=8, devices=8)
    assert str(found) == "process 0 of 1"


# --- the environment ---------------------------------------------------------------

OURS = {
    "LOCKSTEP_COORDINATOR": "127.0.0.1:4711",
    "LOCKSTEP_NUM_PROCESSES": "4",
    "LOCKSTEP_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
OPENMPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "10092.0;tcp://10.0.0.5,192.168.0.5:41555",
}
OPENMPI_5_ON_ONE_MACHINE = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
OPENMPI_5 = OPENMPI_5_ON_ONE_MACHINE | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-gpu-node-3-4711@1",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.1.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "LOCKSTEP_NUM_PROCESSES": "2",
    "LOCKSTEP_COORDINATOR": "train-0.train:4711",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OURS, Launched("lockstep run", 4, 3, "127.0.0.1:4711")),
        (
            OURS | {"LOCKSTEP_LOCAL_COUNT": "4"},
            Launched("lockstep run", 4, 3, "127.0.0.1:4711", 3, 4),
        ),
        (OURS | SLURM, Launched("lockstep run", 4, 3, "127.0.0.1:4711")),
        (SLURM, Launched("SLURM", 4, 2, f"gpu07:{61440 + 5000 % 4096}", 0, 2)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPENMPI_4, Launched("mpirun (OpenMPI)", 2, 1, "10.0.0.5:63340", 0, 1)),
        (
            OPENMPI_5_ON_ONE_MACHINE,
            Launched("mpirun (OpenMPI)", 2, 1, "127.0.0.1:61518", 1, 2),
        ),
        (OPENMPI_5, Launched("mpirun (OpenMPI)", 2, 1, "gpu-node-3:62059", 0, 1)),
        (KUBERNETES, Launched("Kubernetes", 2, 1, "train-0.train:4711")),
        ({"JOB_COMPLETION_INDEX": "1"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launched("mpirun (PMI)", 2, 1, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_the_launcher_is_found(environ, expected):
    assert detect(environ) == expected


def test_each_attempt_and_each_step_of_slurm_has_a_port_of_its_own():
    ports = {
        detect(SLURM | more).address
        for more in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "3"})
    }
    assert len(ports) == 3


def test_jaxs_own_variables_choose_the_address():
    environ = {"JAX_COORDINATOR_ADDRESS": "n1:1", "JAX_COORDINATOR_PORT": "2"}
    assert detect(SLURM | environ).address == "n1:2"
    assert detect(OURS | environ).address == "127.0.0.1:4711"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, "runs only once, outside of srun"),
        (OURS | {"LOCKSTEP_PROCESS_ID": "4"}, "process 4 of 4: the numbers go from 0"),
        (OURS | {"LOCKSTEP_PROCESS_ID": "x"}, "LOCKSTEP_PROCESS_ID='x' is no whole"),
        ({"LOCKSTEP_NUM_PROCESSES": "2"}, "nothing says which process this is"),
    ],
)
def test_a_contradiction_is_told(environ, message):
    with pytest.raises(RuntimeError, match=message):
        detect(environ)


def test_the_first_host_of_a_list():
    assert first_host("a") == "a"
    assert first_host("node[003,007-009],b") == "node003"
    assert first_host("c-[1-2]x,d") == "c-1x"


@pytest.mark.parametrize(
    ("local", "environ", "expected"),
    [
        ((1, 2), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [2, 3]),
        ((0, 1), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
        ((1, 4), {"CUDA_VISIBLE_DEVICES": "0"}, None),
        ((1, 2), {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_GPUS_ON_NODE": "4"}, None),
        ((1, 2), {"CUDA_VISIBLE_DEVICES": ""}, None),
        ((1, 2), {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}, None),
    ],
)
def test_the_gpus_of_a_process(local, environ, expected):
    launched = Launched("SLURM", 4, 0, None, *local)
    visible = local_gpus.shared_gpus(environ)
    assert local_gpus.own_devices(launched, visible) == expected


def test_more_processes_than_gpus_are_refused():
    launched = Launched("lockstep run", 4, 0, None, 0, 4)
    with pytest.raises(RuntimeError, match="4 processes on this machine see 2 GPUs"):
        local_gpus.own_devices(launched, 2)


# --- initialize --------------------------------------------------------------------


def test_a_process_alone_is_not_connected():
    ls.initialize()
    ls.initialize(num_processes=1)
    assert session.current() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_id": 1}, "no launcher tells num_processes"),
        ({"num_processes": 2, "process_id": 1}, "give all three"),
        (("localhost", 2, 1), "it is host:port"),
        (("127.0.0.1:1", 2, 2), "of 2 processes it is from 0 to 1"),
        (("127.0.0.1:1", 0, 0), "num_processes=0: a run has at least 1 process"),
        (("127.0.0.1:99999", 2, 1), "99999': it is host:port"),
    ],
)
def test_incomplete_numbers_are_refused(arguments, message, monkeypatch):
    monkeypatch.setattr("lockstep.distributed.initialization.backend_started", bool)
    with pytest.raises(ValueError, match=message):
        if isinstance(arguments, dict):
            ls.initialize(**arguments)
        else:
            ls.initialize(*arguments)


def test_a_started_backend_is_too_late():
    with pytest.raises(RuntimeError, match="initialize comes too late"):
        ls.initialize("127.0.0.1:1", 2, 0)


def test_a_process_of_a_launcher_does_not_train_alone(monkeypatch):
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="process 3 of 4, started by lockstep run"):
        ls.parallelize(lambda w, x: (w, x.sum()))


# --- arrivals ----------------------------------------------------------------------


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def hello(process, count=2, **versions):
    return Hello(process, count, "host", 100 + process, {"jax": "1"} | versions)


def meet(*guests, own=None, timeout_s=5.0):
    """What process 0 and each guest got: a result or an error."""
    address = free_address()
    own = own or hello(0)

    def outcome(call, *args):
        try:
            return call(*args)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(
            outcome, arrivals.receive_all, address, address.host, own, timeout_s
        )
        others = [
            pool.submit(outcome, arrivals.join, address, guest, timeout_s)
            for guest in guests
        ]
        return first.result(), [other.result() for other in others]


def test_all_arrive():
    arrived, (one, two) = meet(hello(1, 3), hello(2, 3), own=hello(0, 3))
    assert sorted(arrived) == [1, 2]
    for end in (one, two, *(messages for _, messages in arrived.values())):
        end.close()


@pytest.mark.parametrize(
    ("own", "guests", "message"),
    [
        (hello(0, 3), [hello(2, 3)], "2 of 3 processes arrived in 0 s; missing: 1"),
        (hello(0), [hello(1, 3)], "was told that the run has 3 processes"),
        (hello(0, 3), [hello(1, 3)] * 2, "two processes say that they are number 1"),
        (hello(0), [hello(0)], "two processes say that they are number 0"),
        (
            hello(0),
            [hello(1, jax="2")],
            r"versions of jax: process 1 \(.*\) has 2, and",
        ),
    ],
)
def test_who_does_not_fit_is_named_everywhere(own, guests, message):
    first, others = meet(*guests, own=own, timeout_s=0.4)
    for got in (first, *others):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(got)


def test_a_port_in_use_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(RuntimeError, match=f"port {address.port} .* is in use"):
            arrivals.receive_all(address, address.host, hello(0), 1)


def test_an_address_of_another_machine_is_told():
    with pytest.raises(RuntimeError, match="must be a name of the machine"):
        arrivals.receive_all(Address("192.0.2.1", 1), "192.0.2.1", hello(0), 1)


def test_no_process_0_is_told():
    address = free_address()
    with pytest.raises(RuntimeError, match=f"found no process 0 at {address}"):
        arrivals.join(address, hello(1), 0.1)


def test_who_listens_and_does_not_answer_is_told(monkeypatch):
    monkeypatch.setattr(arrivals, "_LATER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        with pytest.raises(RuntimeError, match="has not answered process 1 in 0.2 s"):
            arrivals.join(address, hello(1), 0.1)


def test_strangers_are_sent_away():
    address = free_address()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(arrivals.receive_all, address, address.host, hello(0), 10.0)
        guest = pool.submit(arrivals.join, address, hello(1), 10.0)
        stranger = None
        while not first.done() and stranger is None:
            try:
                stranger = socket.create_connection(address)
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            except OSError:
                continue
        assert list(first.result()) == [1]
        first.result()[1][1].close()
        guest.result().close()
        if stranger is not None:
            stranger.close()


# --- the lines ---------------------------------------------------------------------


@pytest.fixture
def lines():
    """Three lines to one hub, in this process; the exit codes of each."""
    ends = [tuple(map(Messages, socket.socketpair())) for _ in range(3)]
    members = [
        Member(i, f"process {i}", hub_end) for i, (hub_end, _) in enumerate(ends)
    ]
    hub = Hub(members, heartbeat_s=30, hang_timeout_s=None)
    codes = [queue.SimpleQueue() for _ in ends]
    made = [Line(own, i, 3, codes[i].put) for i, (_, own) in enumerate(ends)]
    yield made, codes
    for _, own in ends:
        with contextlib.suppress(OSError):  # a test has ended it
            own.socket.shutdown(socket.SHUT_RDWR)
    assert hub.others_gone.wait(10)
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-"):
            thread.join(10)  # it may still write what the next test would read
    for end in (end for pair in ends for end in pair):
        end.close()


EVERYBODY = (0, 1, 2)


def at_once(lines, call):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(call, lines))


def test_values_are_exchanged_in_order(lines):
    made, codes = lines

    def run(line):
        return [
            line.exchange("main", [line.index, i], what="x", group=EVERYBODY)
            for i in range(5)
        ]

    expected = [[[p, i] for p in EVERYBODY] for i in range(5)]
    assert at_once(made, run) == [expected] * 3
    assert all(code.empty() for code in codes)


def test_a_group_of_some(lines):
    made, _ = lines
    found = at_once(
        made[1:], lambda line: line.exchange("g", line.index, what="x", group=(1, 2))
    )
    assert found == [[1, 2], [1, 2]]


def test_one_who_left_is_named(lines):
    made, _ = lines
    made[2].leave("pass", EVERYBODY)
    with pytest.raises(ProcessLeft, match="process 2 has left its loop, and process 0"):
        made[0].exchange("pass", 1, what="x", group=EVERYBODY)


def test_a_cancelled_exchange_returns(lines):
    made, _ = lines
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    got = made[0].exchange("pass", 1, what="x", group=EVERYBODY, cancelled=stop.is_set)
    assert got is None


def test_all_stop_after_the_step_that_follows_the_furthest(lines):
    made, _ = lines
    for line, passed in zip(made, (3, 5, 4), strict=True):
        for _ in range(passed):
            assert line.stopping.reached() is None
    made[0].stopping.ask("SIGTERM")

    def run_on(line):
        steps = {0: 3, 1: 5, 2: 4}[line.index]
        while True:
            steps += 1
            if signal := line.stopping.reached():
                return steps, signal

    asked = at_once(made, run_on)
    assert len(set(asked)) == 1 and asked[0][1] == "SIGTERM" and asked[0][0] >= 6


@pytest.mark.parametrize(("agreed", "codes"), [(True, []), (False, [143])])
def test_a_sigterm_that_comes_late_does_not_end_a_process_that_has_saved(
    agreed, codes, monkeypatch
):
    """One that was sent to all may reach a process that another one has told before."""
    left = []
    monkeypatch.setattr(faults, "leave_run", left.append)
    line = mock.Mock(index=0, count=2)
    line.stopping.is_agreed = agreed
    before = signal.getsignal(signal.SIGTERM)
    try:
        faults._watch_sigterm(line)
        signal.raise_signal(signal.SIGTERM)
        atexit.unregister(faults._ignore_late_sigterm)
        faults._ignore_late_sigterm(line)  # as at the exit, where handlers are gone
        ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (left, ignored) == (codes, agreed)


def test_a_failure_ends_the_others(lines, capfd):
    made, codes = lines
    assert made[1].claim_end()
    made[1].fail("process 1 failed:\nValueError: bad")
    assert made[1].hear_cause(5) == "process 1 failed:\nValueError: bad"
    assert codes[0].get(timeout=10) == codes[2].get(timeout=10) == 70
    assert codes[1].empty()
    assert "process 0 ends, for process 1 failed:\nValueError" in capfd.readouterr().err


def test_a_hub_that_is_silent_is_told(capfd):
    hub_end, own_end = map(Messages, socket.socketpair())
    line = Line(own_end, 1, 2, queue.SimpleQueue().put, heartbeat_s=0.5)
    said, limit = "", time.monotonic() + 20
    while not said and time.monotonic() < limit:
        said = capfd.readouterr().err
    assert "lockstep: process 0 has been silent for" in said
    hub_end.close()
    assert line.bad_news.wait(10)


def test_different_programs_are_told(lines, capfd):
    made, codes = lines
    for line, what in zip(made, ("the state", "a batch"), strict=False):
        line.exchange("m", 1, what=what, group=EVERYBODY, cancelled=lambda: True)
    assert [code.get(timeout=10) for code in codes] == [70, 70, 70]
    assert "run different programs: process" in capfd.readouterr().err


def test_a_notice_that_a_killed_process_still_held_is_told(lines, capfd):
    made, codes = lines
    said = ("lockstep", logging.WARNING, __file__, 1, "memory is short", (), None)
    made[1].notices.filter(logging.LogRecord(*said))
    made[1].notices.look()
    made[1]._messages.socket.shutdown(socket.SHUT_RDWR)
    assert [code.get(timeout=10) for code in codes] == [70, 70, 70]
    assert "lockstep: process 1 had also to say: memory is" in capfd.readouterr().err


def test_who_goes_on_without_the_others_is_told(lines, capfd):
    made, codes = lines
    made[1].begin_steps(1)
    made[0].exchange("main", 1, what="x", group=EVERYBODY, cancelled=lambda: True)
    assert [code.get(timeout=10) for code in codes] == [70, 70, 70]
    said = "process 0 has come to x after step 0, which all must call together, and"
    assert f"{said} process 1 went on to step 1 without it" in capfd.readouterr().err


def test_a_pass_that_one_process_begins_alone_is_told(lines, capfd):
    made, codes = lines
    first = {"what": "x", "group": EVERYBODY, "cancelled": lambda: True}
    made[1].exchange("pass 0", 1, **first)
    made[1].exchange("pass 0", 1, **first)  # a thread reads ahead
    made[1].exchange("pass 1", 1, **first)
    made[0].exchange("pass 0", 1, **first)
    made[2].exchange("pass 0", 1, **first)
    made[0].begin_steps(1)
    assert [code.get(timeout=10) for code in codes] == [70, 70, 70]
    said = "process 1 has begun a pass over batches (an evaluation?) after step 0, "
    assert said in capfd.readouterr().err


def test_whom_the_others_wait_for_in_a_step_and_at_the_end_is_told(lines, capfd):
    made, _ = lines
    with mock.patch.object(lookout, "_PATIENCE_S", 0.3):
        made[0].begin_steps(2)
        made[1].begin_steps(1)
        made[2].begin_steps(2)
        said = read_until(capfd, "(at step 1, and others have begun step 2)")
        assert "s for process 1 (at step 1" in said
        made[1].begin_steps(1)
        with ThreadPoolExecutor() as pool:
            ends = [pool.submit(made[i].finish) for i in (0, 2)]
            said = read_until(capfd, "still running, and others have come to their end")
            assert "for process 1 (still" in said and not any(e.done() for e in ends)
            made[1].finish()


def read_until(capfd, text):
    said, limit = "", time.monotonic() + 20
    while text not in said and time.monotonic() < limit:
        said += capfd.readouterr().err
    assert text in said
    return said


# --- values ------------------------------------------------------------------------


def test_the_odd_process_is_named(monkeypatch):
    monkeypatch.setattr(session, "exchange", lambda *a, **k: [7, 7, 8])
    with pytest.raises(
        RuntimeError, match="process 2 has 8, and process 0 has 7 .as 1"
    ):
        agreement.agree(7, (0, 1, 2), what="n", cure="Do it.")


def test_equal_values_agree(monkeypatch):
    monkeypatch.setattr(session, "exchange", lambda *a, **k: [7, 7])
    agreement.agree(7, (0, 1), what="n", cure="")


def test_a_digest_tells_bits_apart():
    assert agreement.digest(np.float32(1)) != agreement.digest(1.0)
    assert agreement.digest(np.zeros(2)) != agreement.digest(np.zeros((1, 2)))
    assert agreement.digest(np.array(0.0)) != agreement.digest(np.array(-0.0))


def row(**changed):
    facts = {"host": "a", "pid": 1, "devices": 2, "kind": "cpu (cpu)", "x64": False}
    return facts | changed


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"devices": 3}, r"process 1 \(b\) has 3 devices, and process 0 \(a\) has 2"),
        ({"kind": "H200"}, "has a device of kind H200, and process 0"),
        ({"x64": True}, "has jax_enable_x64 = True"),
    ],
)
def test_unlike_processes_are_refused(odd, message):
    with pytest.raises(RuntimeError, match=message):
        startup.check([row(), row(host="b", **odd), row()])


def test_a_long_table_is_cut():
    text = startup.table([row()] * 40, "SLURM")
    assert len(text.splitlines()) == 19 and "process 39" in text


def test_where_the_real_rows_are(mesh_of):
    shares = Shares((0,), (5,), shards=4, all_shards=4)
    index = shares.real_rows(8, mesh_of(4), "data")
    np.testing.assert_array_equal(index, np.arange(5))
    assert str(Shares((0, 1), (2, 4), 1, 2)) == "process 0 has 2 rows, process 1 has 4"
    many = Shares(tuple(range(16)), (2,) * 15 + (3,), 1, 16)
    assert str(many) == "process 0 has 2 rows, process 15 has 3"
