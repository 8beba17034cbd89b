"""The ways in which lockstep trains, for the same work."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.bench import handwritten
from lockstep.bench.contender import Contender
from lockstep.bench.workload import OwnStep, Workload
from lockstep.data import prefetch
from lockstep.loop.contract import check_output
from lockstep.parallel import ParallelStep, as_parallel, parallelize
from lockstep.step import TrainStep, make_train_step

PARALLELIZE, PER_DEVICE = "parallelize", "per_device"
FROM_THE_HOST = "device view, from the host"


def parallelized(work: Workload, mesh: Mesh) -> Contender:
    """The single-device step of the hand-written loop."""
    step = parallelize(handwritten.whole_batch(work), mesh)
    # As by hand: made by one program, a state of many leaves lies closer together.
    state = step.make_state(lambda tree: tree, handwritten.start(work))
    return _looped(PARALLELIZE, step, state, work)


def own(work: OwnStep, mesh: Mesh) -> Contender:
    """The user's own step, in its view."""
    step = as_parallel(work.step, mesh)
    name = PARALLELIZE if step.view == "global" else PER_DEVICE
    return _looped(name, step, work.state, work)


def made(work: Workload, mesh: Mesh, name: str, **options: Any) -> Contender:
    """A step by `make_train_step` with these options."""
    step, state = _made(work, options)
    return _looped(name, as_parallel(step, mesh), state, work)


def from_the_host(work: Workload, mesh: Mesh) -> Contender:
    """The device view, on batches that come from the host through `prefetch`."""
    step, state = _made(work, {"axis_name": "data", "grad_norm": False})
    parallel = as_parallel(step, mesh)
    batches = iter(prefetch(_forever(work.batch), parallel))
    run = _runner(parallel, [state], lambda: next(batches))
    return Contender(FROM_THE_HOST, run, ours=True)


def _made(work: Workload, options: dict[str, Any]) -> tuple[TrainStep, Any]:
    device = options.get("axis_name") is not None
    loss = work.device_loss if device and work.device_loss else work.loss
    if work.model_state is not None:
        options = {**options, "model_state": True}
    step = make_train_step(loss, work.optimizer, **options)
    # A copy: init takes the parameters over, and they are those of all contenders.
    params, model_state = jax.tree.map(jax.numpy.copy, (work.params, work.model_state))
    return step, step.init(params, model_state=model_state, key=work.key)


def _looped(name: str, step: ParallelStep, state: Any, work: Any) -> Contender:
    batch = step.place_batch(work.batch)
    held = [step.place_state(state)]
    return Contender(
        name,
        _runner(step, held, lambda: batch),
        lambda: step.copy().lower(held[0], batch).compile(),
        ours=True,
    )


def _runner(
    step: ParallelStep, held: list[Any], batch: Callable[[], Any]
) -> Callable[[int], None]:
    """Trains for so many steps; `held[0]` is the newest state."""
    checked = False

    def run(steps: int) -> None:
        nonlocal checked
        for _ in range(steps):  # the step itself keeps two calls in flight
            output = step(held[0], batch())
            if not checked:
                check_output(held[0], output)
                checked = True
            held[0], _ = output
        step.wait()

    return run


def _forever(batch: Any) -> Iterator[Any]:
    return itertools.repeat(batch)
