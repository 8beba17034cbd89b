"""The results of a step that changes no state, batch by batch on the host."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lockstep.data.prefetching import Prefetch, prefetch
from lockstep.parallel import as_parallel, parallelize
from lockstep.parallel.parallel_step import ParallelStep
from lockstep.placement import MaskedBatch, count_rows, to_host
from lockstep.step import TrainStep

# Results are read this many batches late, when the devices are long done with them.
_LAG = 4


class Result(NamedTuple):
    """What a step made of one batch.

    Attributes:
        output: what the step returned.
        mask: which of the batch's rows are real, or `None` for all.
        rows: rows of the global batch, padding included.
        shards: how many stacked parts arrays come in; 0 in the global view.
    """

    output: Any
    mask: Any
    rows: int
    shards: int

    @property
    def real(self) -> int:
        """How many rows are no padding."""
        return self.rows if self.mask is None else int(np.count_nonzero(self.mask))

    def real_rows(self, leaf: Any) -> np.ndarray | None:
        """The rows of an output that belong to real rows; `None` if it has no rows."""
        shape = np.shape(leaf)
        by_rows: tuple[int, ...] = (self.rows,)
        if self.shards:
            by_rows = (self.shards, self.rows // self.shards)
        if shape[: len(by_rows)] != by_rows:
            return None
        leaf = np.reshape(leaf, (self.rows, *shape[len(by_rows) :]))
        return leaf if self.mask is None else leaf[self.mask != 0]


def results(step: ParallelStep, state: Any, batches: Iterable[Any]) -> Iterator[Result]:
    """Run the step over all batches; each result arrives on the host `_LAG` late."""
    state = step.place_state(state)
    placed = batches if isinstance(batches, Prefetch) else prefetch(batches, step)
    waiting: deque[Result] = deque()
    for batch in placed:
        waiting.append(_start_reading(_run(step, state, batch)))
        if len(waiting) > _LAG:
            yield to_host(waiting.popleft())
    yield from map(to_host, waiting)


def _run(step: ParallelStep, state: Any, batch: Any) -> Result:
    output = step(state, batch)
    if isinstance(output, _Output):
        output = output.value
    mask = batch.mask if isinstance(batch, MaskedBatch) else None
    rows = count_rows(batch if mask is None else batch.data)
    shards = step.mesh.shape[step.axis_name] if step.view == "device" else 0
    return Result(output, mask, rows, shards)


def _start_reading(result: Result) -> Result:
    """Copy to the host in the background, so that nobody waits for it later."""
    for leaf in jax.tree.leaves(result):
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Output:
    """Marks what a plain function returns, lest it be taken for a new state."""

    value: Any


def as_eval_step(
    step: Callable[..., Any], state: Any, mesh: Mesh | None, remainder: str | None
) -> ParallelStep:
    """The step on its mesh; a plain function is wrapped once, and compiles once."""
    if isinstance(getattr(step, "fn", step), TrainStep):
        raise TypeError(
            "this is a train step, which changes the state: give evaluate and predict "
            "a function (state, batch) -> metrics or outputs, such as one that calls "
            "the loss with state.params"
        )
    if isinstance(step, ParallelStep):
        return as_parallel(step, mesh, remainder)
    wrap = _wrap
    try:
        hash(step)
    except TypeError:
        wrap = _wrap.__wrapped__
    return wrap(step, mesh or _mesh_of(state), remainder or "unsplit")


@functools.lru_cache(maxsize=8)
def _wrap(fn: Callable[..., Any], mesh: Mesh | None, remainder: str) -> ParallelStep:
    @functools.wraps(fn)
    def run(*args: Any) -> _Output:
        return _Output(fn(*args))

    return parallelize(run, mesh, donate_argnums=(), remainder=remainder)


def _mesh_of(state: Any) -> Mesh | None:
    """The mesh on which a placed state lies."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None
