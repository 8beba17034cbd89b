"""Which threads give way."""

import os
import threading

import pytest

from lockstep.distributed import scheduling
from lockstep.distributed.scheduling import backend_that_gives_way


@pytest.fixture
def start():
    """Starts a thread that waits until the test is over, and returns its number."""
    over, threads = threading.Event(), []

    def start(policy=os.SCHED_OTHER):
        ready = threading.Event()

        def wait():
            os.sched_setscheduler(0, policy, os.sched_param(0))
            ready.set()
            over.wait()

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        ready.wait()
        return threads[-1].native_id

    yield start
    over.set()
    for thread in threads:
        thread.join()


def test_only_threads_that_the_start_makes_give_way(start):
    earlier = start()
    with backend_that_gives_way():
        born = start()
    assert os.sched_getscheduler(born) == os.SCHED_BATCH
    assert os.sched_getscheduler(earlier) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_stays(start):
    with backend_that_gives_way():
        born = start(os.SCHED_IDLE)
    assert os.sched_getscheduler(born) == os.SCHED_IDLE


def test_an_accelerator_keeps_its_threads(start, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with backend_that_gives_way():
        born = start()
    assert os.sched_getscheduler(born) == os.SCHED_OTHER


def test_a_thread_that_has_ended_is_no_matter(monkeypatch):
    seen = iter([set(), {2**31 - 1}])  # no thread has this number
    monkeypatch.setattr(scheduling, "_threads", lambda: next(seen))
    with backend_that_gives_way():
        pass
    assert next(seen, None) is None
