"""`fit`: a script or a function in several processes on a Ray cluster."""

# Ray is an extra: where it is not installed, the checks know none of its names.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.notices import say_once
from lockstep.preemption import Preempted, StopSignals
from lockstep.ray.attempt import Attempt
from lockstep.ray.called import packed
from lockstep.ray.crew import Crew
from lockstep.ray.worker import Task

_ONE_CPU = {"CPU": 1.0}


def fit(
    train: str | os.PathLike[str] | Callable[..., Any],
    *arguments: Any,
    workers: int,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    start_timeout_s: float = 300,
) -> Any:
    """Train on a Ray cluster, in one process a worker, and wait for the end.

    The script or function is the one that runs anywhere else: it calls
    `lockstep.initialize()` first, and a `Trainer` with a `Checkpointer` goes on from
    its newest checkpoint. What the processes write appears here, each line with the
    number of its process. When one of them fails, or its node dies, all end; with
    `max_restarts` all start again, as new workers, where Ray finds room for them.

    SIGTERM and Ctrl-C here are passed on: the processes save, and end.

    Args:
        train: the path of a script that every node has at this place, or in the
            `working_dir` of Ray's `runtime_env`; or a function, which is sent there
            with its arguments.
        *arguments: of the script, as on a command line, or of the function.
        workers: how many processes.
        resources: what Ray reserves for each of them, as it counts: `{"CPU": 8,
            "GPU": 4}` for a process that drives 4 GPUs. One CPU by default.
        environment: variables for the processes, such as `{"XLA_FLAGS": ...}`.
        max_restarts: how often to start all again after a failure.
        start_timeout_s: how long to wait for room on the cluster.

    Returns:
        What the function returned in process 0; `None` for a script.

    Raises:
        RuntimeError: Ray is not connected or has no room; or a process failed in the
            last attempt: names it, its host and its last line.
        TypeError: the function or its arguments cannot be sent to other processes.
        Preempted: SIGTERM; the run has saved. Exit code 75, if nobody catches it.
        KeyboardInterrupt: Ctrl-C; the run has saved.

    Example:
        >>> fit("train.py", workers=0)
        Traceback (most recent call last):
        ValueError: workers=0: at least one process has to train
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: at least one process has to train")
    _check_ray()
    resources = dict(resources or _ONE_CPU)
    _check_gpus(resources)
    task = _task(train, arguments, environment or {})
    for restart in range(max_restarts + 1):
        crew = Crew(workers, resources, start_timeout_s)
        attempt = Attempt(crew)
        try:
            with StopSignals() as signals:
                attempt.run(task, restart, signals)
            if attempt.failure is None or attempt.stopped:
                return _outcome(attempt, crew)
        finally:
            crew.release()
        if restart < max_restarts:
            again = f"starting all {workers} again, {restart + 1} of {max_restarts}"
            _say(f"{attempt.failure}\n{again}")
    raise RuntimeError(f"{attempt.failure}{_after(max_restarts)}")


def _outcome(attempt: Attempt, crew: Crew) -> Any:
    """What `fit` returns or raises where it does not start again."""
    if attempt.stopped and attempt.failure:
        raise RuntimeError(f"{attempt.stopped}, and then: {attempt.failure}")
    if attempt.stopped == "SIGINT":
        raise KeyboardInterrupt("all processes have saved, and ended")
    if attempt.saved:
        message = f"{attempt.stopped or 'SIGTERM'}: all processes have saved, and ended"
        _say(message)  # an exit code ends Python without a word
        raise Preempted(message)
    data = crew.result()
    if data is None:
        return None
    from ray import cloudpickle

    return cloudpickle.loads(data)


def _task(
    train: str | os.PathLike[str] | Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> Task:
    environment = {name: str(value) for name, value in environment.items()}
    if callable(train):
        return Task((), packed(train, arguments), environment)
    script = (os.fspath(train), *map(str, arguments))
    return Task(script, None, environment)


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise RuntimeError('Ray is not installed: pip install "lockstep-jax[ray]"')
    import ray

    if not ray.is_initialized():
        raise RuntimeError(
            "this program is not connected with a Ray cluster: call ray.init() first "
            "(alone it starts a cluster on this machine)"
        )


def _check_gpus(resources: Mapping[str, float]) -> None:
    """Ray hides the GPUs of a node from a worker that reserves none."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0)
    if gpus and not resources.get("GPU"):
        say_once(
            "ray.fit without GPUs",
            f"the Ray cluster has {gpus:g} GPUs, and the workers reserve none and see "
            'none: give resources={"GPU": n} for n GPUs a process',
        )


def _say(text: str) -> None:
    for line in text.splitlines():
        print(f"lockstep.ray: {line}", file=sys.stderr, flush=True)


def _after(restarts: int) -> str:
    return f" (after {restarts} restart{'s' * (restarts > 1)})" if restarts else ""
