"""What needs no Ray of `lockstep.ray`; tests/cluster/test_ray.py has the rest."""

import importlib.util
from unittest import mock

import pytest

import lockstep as ls
from lockstep.preemption import StopSignals
from lockstep.ray import attempt as attempts
from lockstep.ray.attempt import Attempt
from lockstep.ray.crew import Crew
from lockstep.ray.worker import LOST, Report, Task, Worker


class Told:
    """A crew that reports what it was told to, one list after the other."""

    def __init__(self, count, *news):
        self.count, self.names = count, [f"process {i}" for i in range(count)]
        self.killed, self.asked = [], 0
        self._news = iter(news)

    def start(self, task, restart):
        pass

    def news(self):
        return next(self._news, [])

    def kill(self, index):
        self.killed.append(index)

    def ask_to_stop(self):
        self.asked += 1


def watch(crew, signals=None) -> Attempt:
    attempt = Attempt(crew)
    attempt.run(Task((), None, {}), 0, signals or StopSignals())
    return attempt


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(attempts, "_GRACE_S", 0.0)
    monkeypatch.setattr(attempts, "_KILL_S", 0.0)


def ended(code, last="") -> Report:
    return Report(code=code, last=last)


class TestAttempt:
    def test_that_goes_well_has_no_failure(self):
        crew = Told(2, [(1, Report())], [(1, ended(0))], [(0, ended(0))])
        done = watch(crew)
        assert done.failure is None and not done.saved and not crew.killed

    def test_shows_what_the_processes_write_where_they_wrote_it(self, capsys):
        watch(Told(1, [(0, Report(b"[0] out\n", b"[0] err\n"))], [(0, ended(0))]))
        assert capsys.readouterr() == ("[0] out\n", "[0] err\n")

    def test_names_the_process_that_failed_first_by_itself(self):
        """70 is the code of those that end for another one's failure."""
        done = watch(Told(2, [(0, ended(70, "for 1"))], [(1, ended(1, "ValueError"))]))
        assert done.failure == "process 1 failed with exit code 1: ValueError"

    def test_shows_the_reports_of_native_code_of_a_crash(self, capsys):
        done = watch(Told(1, [(0, Report(code=-11, native=b"at 0x12\n"))]))
        assert done.failure == "process 0 was ended by signal 11"
        assert "at 0x12" in capsys.readouterr().err

    def test_ends_the_others_after_a_failure(self, impatient):
        crew = Told(3, [(1, LOST)], [(0, ended(-9)), (2, ended(-9))])
        lost = "process 1 was lost: its Ray worker is gone, or its machine"
        assert watch(crew).failure == lost
        assert crew.killed == [0, 2]

    def test_gives_up_workers_that_never_answer(self, impatient):
        done = watch(Told(2, [(1, ended(3, "disk full"))]))
        assert done.failure == "process 1 failed with exit code 3: disk full"

    @pytest.mark.parametrize(("codes", "saved"), [((75, 75), True), ((75, 1), False)])
    def test_passes_a_signal_on_once(self, codes, saved):
        class Asked(StopSignals):
            def asked(self, step):
                return "SIGTERM"

        crew = Told(2, [], [], list(enumerate(map(ended, codes))))
        done = watch(crew, Asked())
        assert crew.asked == 1 and done.stopped == "SIGTERM" and done.saved == saved


def test_a_worker_that_dies_before_the_start_is_the_one_that_failed(monkeypatch):
    """Its process never ran, and neither does that of any other."""
    monkeypatch.setattr(Crew, "_answer", lambda self, call: call)
    crew = object.__new__(Crew)
    crew.count, crew.names, crew._lost = 2, ["process 0", "process 1"], set()
    crew._workers = [mock.Mock(), mock.Mock()]
    crew._workers[0].place.remote.return_value = ("a", "a:1")
    crew._workers[1].place.remote.return_value = LOST
    assert watch(crew).failure == (
        "process 1 was lost: its Ray worker is gone, or its machine"
    )
    assert not crew._workers[0].start.remote.called


class TestWorker:
    @pytest.fixture
    def start(self, tmp_path):
        workers = []

        def start(text: str) -> Worker:
            script = tmp_path / "script.py"
            script.write_text(text)
            workers.append(Worker(1, "127.0.0.1"))
            task = Task((str(script), "--lr", "1"), None, {"COLOUR": "blue"})
            workers[-1].start(task, 2, "127.0.0.1:4711", 3)
            return workers[-1]

        yield start
        for worker in workers:
            worker.clear()

    @staticmethod
    def finish(worker) -> Report:
        out = err = b""
        while True:
            report = worker.poll(30)
            out, err = out + report.out, err + report.err
            if report.code is not None:
                return Report(out, err, report.code, report.last)

    def test_tells_its_process_who_it_is(self, start):
        names = "COORDINATOR NUM_PROCESSES PROCESS_ID LOCAL_COUNT RESTART STARTED_BY"
        text = f"import os, sys\nnames = {names!r}.split()\nprint(sys.argv[1:])\n"
        text += "print([os.environ['LOCKSTEP_' + name] for name in names])\n"
        text += "print(os.environ['COLOUR'])\n"
        report = self.finish(start(text))
        expected = ["127.0.0.1:4711", "2", "1", "1", "3", "Ray"]
        lines = ["['--lr', '1']", repr(expected), "blue"]
        assert report.out.decode() == "".join(f"[1] {line}\n" for line in lines)
        assert report.code == 0

    def test_reports_the_last_line_of_a_failure(self, start):
        report = self.finish(start("raise ValueError('row 7')"))
        assert report.code == 1 and report.last == "ValueError: row 7"

    def test_passes_sigterm_on(self, start):
        text = "import signal, sys\n"
        text += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        text += "print('ready')\nsignal.pause()\n"
        worker = start(text)
        while b"ready" not in worker.poll(30).out:
            pass
        worker.ask_to_stop()
        assert self.finish(worker).code == 75

    def test_ends_its_process_and_what_that_has_started(self, start):
        worker = start("import os, time\nprint('ready')\nos.fork()\ntime.sleep(60)\n")
        while b"ready" not in worker.poll(30).out:
            pass
        worker.end()
        assert self.finish(worker).code == -9  # the child would hold the stream open


class TestFit:
    def test_says_how_to_install_ray(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match=r'pip install "lockstep-jax\[ray\]"'):
            ls.ray.fit("train.py", workers=2)

    def test_wants_workers(self):
        with pytest.raises(ValueError, match="workers=0: at least one process"):
            ls.ray.fit("train.py", workers=0)
