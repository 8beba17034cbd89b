"""Processes that are started one by one, as on a cluster, and do not find together.

No launcher watches them here: each says by itself what is wrong, and in time.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import portpicker
import pytest

SCRIPT = str(Path(__file__).with_name("topologies") / "starting.py")
SOURCE = str(Path(__file__).parents[1] / "src")
LIMIT_S = 60  # an upper bound on hangs

pytestmark = pytest.mark.full


@pytest.fixture
def start():
    """Starts a process, that of an index among so many."""
    processes = []

    def start(address, count, index, timeout_s=4.0, delay_s=0.0):
        numbers = [str(x) for x in (count, index, timeout_s, delay_s)]
        inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        process = subprocess.Popen(
            [sys.executable, SCRIPT, address, *numbers],
            env=inherited | {"PYTHONPATH": SOURCE, "JAX_NUM_CPU_DEVICES": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def end_of(process):
    """The exit code, standard output, and the last line of standard error."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, (err.splitlines() or [""])[-1]


def free_address():
    return f"127.0.0.1:{portpicker.pick_unused_port()}"


NO_ZERO = "RuntimeError: process 1 found no process 0 at 127.0.0.1:"
OTHER_COUNT = "was told that the run has"
TWO_ONES = "two processes say that they are number 1"


@pytest.mark.parametrize(
    ("started", "said"),
    [
        ([(2, 1)], [NO_ZERO]),
        ([(3, 0), (3, 2)], ["2 of 3 processes arrived in 4 s; missing: 1"] * 2),
        ([(3, 0), (2, 1)], [OTHER_COUNT] * 2),
        ([(2, 0), (3, 1)], [OTHER_COUNT] * 2),
        ([(3, 0), (3, 1), (3, 1)], [TWO_ONES] * 3),
        (
            [(2, 0), (2, 2)],
            [
                "1 of 2 processes arrived in 4 s; missing: 1",
                "ValueError: process_id=2: of 2 processes it is from 0 to 1",
            ],
        ),
    ],
)
def test_who_does_not_fit_is_named_in_time(start, started, said):
    address = free_address()
    processes = [start(address, *who) for who in started]
    for process, expected in zip(processes, said, strict=True):
        code, out, last = end_of(process)
        assert (code, out) == (1, "")
        assert expected in last


def test_a_coordinator_that_is_late_is_waited_for(start):
    address = free_address()
    processes = [
        start(address, 2, 0, timeout_s=30, delay_s=3),
        start(address, 2, 1, timeout_s=30),
    ]
    assert_add_up(processes)


@contextmanager
def something_else_at_a_port():
    """Accepts every connection and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "{}:{}".format(*server.getsockname())
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_port_in_use_is_named_by_all(start):
    with something_else_at_a_port() as address:
        assert_cannot_start_at(address, start)


def test_a_second_job_at_the_same_port_leaves_the_first_one_alone(start):
    address = free_address()
    first = [start(address, 2, index, timeout_s=30) for index in range(2)]
    for process in first:
        assert process.stdout.readline() == "connected\n"
    assert_cannot_start_at(address, start)
    assert_add_up(first)


def assert_add_up(processes):
    for process in processes:
        print(file=process.stdin, flush=True)
    for process in processes:
        code, out, _ = end_of(process)
        assert code == 0 and out.endswith("sum 2.0\n")


def assert_cannot_start_at(address, start):
    host, port = address.split(":")
    zero, one = (start(address, 2, index) for index in range(2))
    code, out, last = end_of(zero)
    assert (code, out) == (1, "")
    assert f"RuntimeError: port {port} on {host} is in use, by another run perh" in last
    code, out, last = end_of(one)
    assert (code, out) == (1, "")
    # The other program may hang up on a stranger, or leave it waiting.
    assert "and then went away: it failed" in last or "has not answered" in last
