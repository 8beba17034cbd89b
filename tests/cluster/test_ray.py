"""`lockstep.ray.fit` on a real Ray of this machine, whose start takes most of the time.

So one program trains several times, and the tests read what it has printed.
"""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from cluster.launches import TRAIN, Launch, pid_of

pytestmark = pytest.mark.cluster

ON_RAY = Path(__file__).with_name("on_ray.py")
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Story:
    """All that happened: two workers were killed, then the program got SIGTERM."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-W", "error", ON_RAY, TRAIN, folder]
        with Launch(*command, limit_s=240, **LOOPBACK) as run:
            self.first_killed = self._kill_process(run)
            self.orphan = self._kill_worker(run)
            run.until("^trained")
            self.trained = run.text
            run.until(r"goes on after step 1200")
            run.until(r"step 1600: ")
            os.kill(run.pid, signal.SIGTERM)
            self.code = run.finish()
            self.text = run.text

    def _kill_process(self, run: Launch) -> int:
        run.until("step 400: ")
        pid = pid_of(1, run.text)
        os.kill(pid, signal.SIGKILL)
        return pid

    def _kill_worker(self, run: Launch) -> int:
        """Kill the actor of process 0: as when Ray, or the node, goes away."""
        run.until("goes on after step")
        pid = pid_of(0, run.text)
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        return pid


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return Story(tmp_path_factory.mktemp("ray"))


def test_a_function_runs_in_every_process_and_returns_what_the_first_does(story):
    assert "returned: (2, 2, 7)" in story.text
    assert "2 processes (Ray), 2 devices of kind cpu" in story.text


def test_the_error_of_one_process_is_raised_with_its_number(story):
    error = r"raised: process 1 of 2 \(\S+\) failed with exit code 1: ValueError: row 7"
    assert re.search(error, story.text), story.text


def test_a_cluster_without_room_is_named(story):
    assert "found no room for 3 workers of {'CPU': 1.0} each in 2 s" in story.text
    assert "the cluster has {'CPU': 2.0} in all" in story.text


def test_killed_workers_are_replaced_and_the_training_is_that_of_one_process(
    story, assert_as_alone
):
    said = re.findall(r"lockstep.ray: (.*)", story.trained)
    assert re.fullmatch(r"process 1 of 2 \(\S+\) was ended by signal 9", said[0])
    assert said[1] == "starting all 2 again, 1 of 2"
    assert re.fullmatch(
        r"process 0 of 2 .* was lost: its Ray worker is gone.*", said[2]
    )
    assert said[3] == "starting all 2 again, 2 of 2"
    assert_as_alone(story.trained)


def test_a_process_ends_with_its_worker(story):
    assert not psutil.pid_exists(story.orphan)


def test_sigterm_saves_everywhere_and_ends_with_75(story):
    assert story.code == 75, story.text[-4000:]
    saved = re.findall(r"SIGTERM: the run ended after step (\d+) and is", story.text)
    assert len(saved) == 1 and int(saved[0]) >= 1600  # all have this to say, one does
