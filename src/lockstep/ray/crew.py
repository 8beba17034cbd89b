"""The workers of one attempt, as actors of Ray: the one file that talks to Ray."""

# Ray is an extra: where it is not installed, the checks know none of its names.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from collections.abc import Mapping
from typing import Any

from lockstep.distributed.line import EXIT_OTHER_FAILED
from lockstep.ray.worker import LOST, Report, Task, Worker

_END_S = 10.0
_POLLS_PER_S = 200  # of all workers together


class Crew:
    """Workers that start together, and are heard one by one.

    Attributes:
        count: how many they are.
        names: how messages call their processes.
    """

    def __init__(
        self, count: int, resources: Mapping[str, float], start_timeout_s: float
    ) -> None:
        """Reserve room for all workers, then make them.

        Raises:
            RuntimeError: the cluster has no room for them in time.
        """
        import ray

        self.count = count
        self.names = [f"process {index} of {count}" for index in range(count)]
        self._ray = ray
        self._room = _reserve(count, resources, start_timeout_s)
        self._workers = _actors(self._room, count, resources)
        self._wait_s = max(0.5, count / _POLLS_PER_S)
        self._polls: dict[Any, int] = {}
        self._lost: set[int] = set()

    def start(self, task: Task, restart: int) -> None:
        """Start all processes, on a port that no other attempt has used."""
        places = self._ask_all([worker.place.remote() for worker in self._workers])
        if self._lost:
            return
        for index, (host, _) in enumerate(places):
            self.names[index] = f"process {index} of {self.count} ({host})"
        start = task, self.count, places[0][1], restart
        self._ask_all([worker.start.remote(*start) for worker in self._workers])
        for index in range(self.count):
            self._poll(index)

    def news(self) -> list[tuple[int, Report]]:
        """What some of the processes have to report, after a moment."""
        if self._lost:  # before all had started
            others = Report(code=EXIT_OTHER_FAILED)
            return [(i, LOST if i in self._lost else others) for i in range(self.count)]
        reports = []
        for poll in self._ray.wait(list(self._polls), timeout=self._wait_s)[0]:
            index = self._polls.pop(poll)
            report = self._answer(poll)
            if report.code is None:
                self._poll(index)
            reports.append((index, report))
        return reports

    def ask_to_stop(self) -> None:
        """Let all processes save and end."""
        for worker in self._workers:
            worker.ask_to_stop.remote()

    def kill(self, index: int) -> None:
        """End a process at once."""
        self._workers[index].end.remote()

    def result(self) -> bytes | None:
        """What the function returned in process 0, pickled."""
        return self._ray.get(self._workers[0].result.remote())

    def release(self) -> None:
        """Leave nothing on the cluster."""
        from ray.util import remove_placement_group

        last = [worker.clear.remote() for worker in self._workers]
        self._ray.wait(last, num_returns=len(last), timeout=_END_S)
        for worker in self._workers:
            self._ray.kill(worker)
        remove_placement_group(self._room)

    def _poll(self, index: int) -> None:
        self._polls[self._workers[index].poll.remote(self._wait_s)] = index

    def _ask_all(self, calls: list[Any]) -> list[Any]:
        """The answers of all workers; notes which are gone."""
        answers = [self._answer(call) for call in calls]
        self._lost = {i for i, answer in enumerate(answers) if answer is LOST}
        return answers

    def _answer(self, call: Any) -> Any:
        """What a worker answers; `LOST` where it is gone."""
        from ray.exceptions import RayActorError

        try:
            return self._ray.get(call)
        except RayActorError:
            return LOST


class _OnThisNode(Worker):
    """A worker that asks Ray for the address of its node."""

    def __init__(self, index: int) -> None:
        import ray

        super().__init__(index, ray.util.get_node_ip_address())


def _reserve(count: int, resources: Mapping[str, float], timeout_s: float) -> Any:
    """Room for all workers or for none: two runs never hold half of it each."""
    import ray
    from ray.util import placement_group, remove_placement_group

    room = placement_group([dict(resources)] * count, strategy="PACK")
    if room.wait(timeout_s):
        return room
    remove_placement_group(room)
    total = {name: ray.cluster_resources().get(name, 0) for name in resources}
    raise RuntimeError(
        f"Ray found no room for {count} workers of {dict(resources)} each in "
        f"{timeout_s:g} s: the cluster has {total} in all, and other programs may hold "
        "a part. Ask for less, add nodes, or wait longer (start_timeout_s=)"
    )


def _actors(room: Any, count: int, resources: Mapping[str, float]) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    more = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
    actor = ray.remote(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=more,
        max_restarts=0,
    )(_OnThisNode)
    return [
        actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                room, placement_group_bundle_index=index
            )
        ).remote(index)
        for index in range(count)
    ]
