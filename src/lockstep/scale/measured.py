"""The figures of the user's own step: its time on one device, what it all-reduces."""

import statistics

import jax

from lockstep import tree
from lockstep.bench import handwritten, timing
from lockstep.bench.workload import Workload
from lockstep.devices import make_mesh
from lockstep.parallel import per_device
from lockstep.scale.predict import Training
from lockstep.step import make_train_step


def measure(work: Workload, *, turns: int = 5) -> Training:
    """Time the step on one device with the batch of the workload; count its messages.

    Bytes and messages are those of the compiled step of the device view. For one device
    alone there is no such text: then the parameters are taken, in one message. In
    several processes each times its own step, all at once.
    """
    own = make_mesh(devices=jax.local_devices()[:1])
    [row] = timing.take_turns(
        {"one device": lambda: handwritten.alone(work, own)}, turns=turns
    )
    alone = jax.device_count() == 1
    nbytes, messages = (tree.nbytes(work.params), 1) if alone else all_reduced(work)
    return Training(
        compute_s=statistics.median(row.step_ms) / 1e3,
        nbytes=nbytes,
        messages=messages,
    )


def all_reduced(work: Workload) -> tuple[int, int]:
    """Bytes and messages of the all-reduces of a step on all devices."""
    from lockstep.debug import collectives

    step = make_train_step(
        work.device_loss or work.loss,
        work.optimizer,
        axis_name="data",
        model_state=work.model_state is not None,
    )
    params, model_state = jax.tree.map(jax.numpy.copy, (work.params, work.model_state))
    state = step.init(params, model_state=model_state, key=work.key)
    found = collectives(per_device(step), state, work.batch)
    rows = [r for r in found.rows if r.kind == "all-reduce"]
    # A GPU sends the arrays of one all-reduce together, gloo one after the other.
    by_array = jax.default_backend() == "cpu"
    messages = sum(r.rounds * (len(r.arrays) if by_array else 1) for r in rows)
    return sum(r.nbytes * r.rounds for r in rows), max(messages, 1)
