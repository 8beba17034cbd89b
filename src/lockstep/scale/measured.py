"""The figures of the user's own step: timed on one device, its bytes from its text."""

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
    """Time the step on one device with the batch of the workload; count its bytes.

    The bytes are those that the compiled step of the device view all-reduces; with one
    device alone there is no such text, and they are those of the parameters.
    """
    mesh = make_mesh()
    [row] = timing.take_turns(
        {"one device": lambda: handwritten.alone(work, mesh)}, turns=turns
    )
    return Training(
        compute_s=statistics.median(row.step_ms) / 1e3,
        nbytes=_reduced_bytes(work) if mesh.size > 1 else tree.nbytes(work.params),
    )


def _reduced_bytes(work: Workload) -> int:
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
    return sum(r.nbytes * r.rounds for r in found.rows if r.kind == "all-reduce")
