"""Five steps of a cell: over its devices, on one device, and written by hand."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import make_mesh_of
from equivalence.grid import Cell
from equivalence.models import TASKS, Task
from jax.sharding import Mesh

import lockstep as ls
from lockstep.metrics import Mean, compute
from lockstep.parallel import as_parallel

STEPS = 5
ROWS = {"full": 32, "ragged": 13, "one": 1}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f64": jnp.float64}


class Run(NamedTuple):
    """What a training run gave.

    Attributes:
        metrics: of each step.
        params: after the last step.
        model_state: after the last step.
    """

    metrics: list[dict[str, float]]
    params: Any
    model_state: Any


def precision(name: str) -> Any:
    """The context in which a cell of this precision runs."""
    return jax.enable_x64(True) if name == "f64" else contextlib.nullcontext()


def mesh_of(devices: int | str) -> Mesh:
    """The mesh of a level of the factor `devices`."""
    if devices == "4x2":
        return make_mesh_of(8, {"data": 4, "model": 2})
    return make_mesh_of(int(devices))


def task_of(cell: Cell, axis_name: str | None = None) -> Task:
    """The cell's task; without dropout where the devices would draw other masks."""
    dropout = 0.25 if cell.view == "global" else 0.0
    return TASKS[cell.task](DTYPES[cell.precision], axis_name, dropout)


def batches_of(cell: Cell, task: Task) -> list[Any]:
    """The same five batches for all runs of a cell."""
    rng = np.random.default_rng(1)
    return [task.draw(rng, ROWS[cell.batch]) for _ in range(STEPS)]


class OnDevices:
    """A cell's step on its mesh; any batch of the factor trains with one compile."""

    def __init__(self, cell: Cell) -> None:
        axis_name = "data" if cell.view == "device" else None
        with precision(cell.precision):
            self.task = task_of(cell, axis_name)
            self.step = _made_step(cell, self.task, axis_name)
            # Statistics that a layer reduces over devices are refused under padding.
            meets = self.task.model_state is not None and cell.view == "device"
            remainder = "error" if meets else "pad"
            self.run = as_parallel(self.step, mesh_of(cell.devices), remainder)

    def train(self, cell: Cell) -> Run:
        """Train from the start on the cell's batches."""
        with precision(cell.precision):
            batches = batches_of(cell, self.task)
            got = _train(self.run, _start(self.step, self.task), batches)
            assert self.run.compiles.count == 1
            return got


@functools.cache
def on_one_device(cell: Cell) -> Run:
    """The same step under plain `jax.jit`."""
    with precision(cell.precision):
        task = task_of(cell)
        step = _made_step(cell, task, None)
        batches = batches_of(cell, task)
        if ROWS[cell.batch] % cell.accumulate:
            batches = [ls.pad_batch(batch, cell.accumulate) for batch in batches]
        return _train(jax.jit(step), _start(step, task), batches)


def _made_step(cell: Cell, task: Task, axis_name: str | None) -> Any:
    # The negatives of a row are those of its microbatch, by hand as well.
    in_parts = cell.task == "contrastive" and cell.accumulate > 1
    return ls.make_train_step(
        task.loss,
        task.optimizer,
        model_state=task.model_state is not None,
        accumulate=cell.accumulate,
        axis_name=axis_name,
        rows="local" if in_parts else None,
    )


def _start(step: Any, task: Task) -> Any:
    key = jax.random.key(7) if task.takes_key else None
    return step.init(task.params, model_state=task.model_state, key=key)


def _train(step: Any, state: Any, batches: list[Any]) -> Run:
    metrics = []
    for batch in batches:
        state, step_metrics = step(state, batch)
        metrics.append(compute(step_metrics))
    return Run(metrics, *jax.device_get((state.params, state.model_state)))


@functools.cache
def by_hand(cell: Cell) -> Run:
    """The run of somebody who has one device and has not heard of lockstep."""
    with precision(cell.precision):
        task = task_of(cell)
        step = hand_step(hand_loss(task, cell.accumulate), task.optimizer)
        return train_by_hand(jax.jit(step), cell, task)


def train_by_hand(step: Any, cell: Cell, task: Task) -> Run:
    """Train with a step of one's own, which may be wrapped by lockstep."""
    state = task.params, task.optimizer.init(task.params), task.model_state
    metrics = []
    for i, batch in enumerate(batches_of(cell, task)):
        key = ls.step_key(jax.random.key(7), i)
        state, step_metrics = step(state, batch, key)
        metrics.append(compute(step_metrics))
    return Run(metrics, *jax.device_get((state[0], state[2])))


def hand_step(loss: Any, optimizer: Any, reduce: Any = None) -> Any:
    """The step that the guides teach.

    Args:
        loss: `(params, model_state, batch, key) -> value, model_state`.
        optimizer: an optax optimizer.
        reduce: what averages `(value, grads, model_state)` over devices.
    """

    def step(state, batch, key):
        params, opt_state, model_state = state
        grad_fn = jax.value_and_grad(loss, has_aux=True)
        (value, model_state), grads = grad_fn(params, model_state, batch, key)
        if reduce is not None:
            value, grads, model_state = reduce((value, grads, model_state))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "error": value, "grad_norm": _norm(grads)}
        return (params, opt_state, model_state), metrics

    return step


def hand_loss(task: Task, k: int = 1) -> Any:
    """The loss over k microbatches, which are a Python loop and hold no padding."""

    def loss(params, model_state, batch, key):
        total = count = 0.0
        for j in range(k):
            part = jax.tree.map(lambda x, j=j: x[j::k], batch)
            if rows := len(jax.tree.leaves(part)[0]):
                part_key = key if k == 1 else jax.random.fold_in(key, j)
                value, model_state = _call(task, params, model_state, part, part_key)
                mean = value if isinstance(value, Mean) else _mean(value, rows)
                total, count = total + mean.total, count + mean.count
        return total / count, model_state

    return loss


@functools.cache
def signal(task: str) -> Any:
    """The gradients before the first step in double precision: which leaves learn."""
    cell = Cell(task, 1, "device", 1, "full", "f64")
    with precision("f64"):
        it = task_of(cell)
        grad = jax.jit(jax.grad(hand_loss(it), has_aux=True))
        args = it.params, it.model_state, batches_of(cell, it)[0], jax.random.key(0)
        return jax.device_get(grad(*args)[0])


def _call(task: Task, params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    """The value of a loss of any form, and the new model state."""
    keys = (key,) if task.takes_key else ()
    if task.model_state is None:
        return task.loss(params, batch, *keys)[0], None
    value, (_, model_state) = task.loss(params, model_state, batch, *keys)
    return value, model_state


def _mean(value: jax.Array, rows: int) -> Mean:
    return Mean(jnp.mean(_widen(value)) * rows, rows)


def _norm(grads: Any) -> jax.Array:
    leaves = jax.tree.leaves(grads)
    return jnp.linalg.norm(jnp.concatenate([jnp.ravel(_widen(g)) for g in leaves]))


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
