"""One call of a step, described by shapes and shardings: enough to compile it.

Nothing is placed and nothing runs, so a call that does not fit can be described too,
and so can one whose arguments were donated.
"""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep import placement, sharding, tree
from lockstep.memory.usage import Usage, measure
from lockstep.placement import MaskedBatch
from lockstep.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step and the description of one call.

    Attributes:
        step: has `lower(*args, **keywords)`.
        args: trees of `jax.ShapeDtypeStruct`, with shardings where they are known.
        keywords: the keyword arguments, described as well.
        batch_argnums: which arguments hold rows.
        rows_axis: the axis of the rows; 1 for a mapped function of `compat.pmap`.
        devices: over how many devices the rows are split.
    """

    step: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    batch_argnums: tuple[int, ...]
    rows_axis: int
    devices: int

    @property
    def train_step(self) -> TrainStep | None:
        """What `make_train_step` made, if this is such a step."""
        function = getattr(self.step, "fn", None)
        return function if isinstance(function, TrainStep) else None

    @property
    def state(self) -> Any:
        """The first argument, unless it is a batch."""
        return None if 0 in self.batch_argnums or not self.args else self.args[0]

    @property
    def rows(self) -> int:
        """Rows of one call, on all devices together; 0 without a batch."""
        on_devices = 1 if self.rows_axis == 0 else self.devices
        for i in self.batch_argnums:
            for leaf in jax.tree.leaves(self.args[i]):
                if len(getattr(leaf, "shape", ())) > self.rows_axis:
                    return leaf.shape[self.rows_axis] * on_devices
        return 0

    @property
    def unit(self) -> int:
        """A number of rows has to be a multiple of this."""
        train_step = self.train_step
        parts = train_step.parts_on_each(self.devices) if train_step else 1
        return self.devices * parts

    def device_bytes(self, leaf: Any) -> int:
        """Bytes of a described leaf on one device."""
        if not hasattr(leaf, "shape"):
            return 0
        shape, where = leaf.shape, getattr(leaf, "sharding", None)
        if where is not None:
            shape = where.shard_shape(shape)
        elif self.rows_axis:
            shape = shape[1:]
        return math.prod(shape) * leaf.dtype.itemsize

    def lower(self) -> Any:
        """`jax.stages.Lowered` of the call; the step's log of compiles stays as it is.

        The step is one of its own, so that a later call compiles and is noted.
        """
        with self.unnoted() as step, warnings.catch_warnings():
            # The report tells how much of the state is reused.
            warnings.filterwarnings("ignore", "Some donated buffers")
            return step.lower(*self.args, **self.keywords)

    @contextmanager
    def unnoted(self) -> Iterator[Any]:
        """The step, for programs that its log of compiles does not note."""
        step = self.step.copy() if hasattr(self.step, "copy") else self.step
        log = getattr(step, "compiles", None)
        with log.paused() if log else nullcontext():
            yield step

    def usage(self) -> Usage:
        """Compile the call and read its memory."""
        return measure(self.lower().compile())

    def with_rows(self, rows: int) -> "Plan":
        """The same call with another number of rows in each batch."""
        axis, new = self.rows_axis, rows
        if axis:
            new = rows // self.devices

        def resize(leaf: Any) -> Any:
            if len(getattr(leaf, "shape", ())) <= axis:
                return leaf
            shape = (*leaf.shape[:axis], new, *leaf.shape[axis + 1 :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

        args = list(self.args)
        for i in self.batch_argnums:
            args[i] = jax.tree.map(resize, args[i])
        return dataclasses.replace(self, args=tuple(args))

    def with_train_step(self, train_step: TrainStep) -> "Plan":
        """The same call of another train step."""
        return dataclasses.replace(self, step=self.step.copy(train_step))


def plan_call(
    step: Any,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    batch_argnums: tuple[int, ...] = (1,),
    rows_axis: int | None = None,
) -> Plan:
    """Describe a call of a `ParallelStep`, or of anything else that can be lowered.

    Args:
        step: the step.
        args: the arguments of the call: arrays, host values or descriptions.
        keywords: its keyword arguments.
        batch_argnums: which arguments are batches; a `ParallelStep` knows that itself.
        rows_axis: the axis of their rows; `None` is 1 for `compat.pmap`, else 0.

    Raises:
        ValueError: rows that do not divide, under `remainder="error"`.
    """
    if not hasattr(step, "place_batch"):
        if rows_axis is None:  # a mapped function can be watched, one of JAX cannot
            rows_axis = int(hasattr(step, "observers"))
        args, keywords = jax.tree.map(_as_it_lies, (args, keywords))
        found = tuple(i for i in batch_argnums if i < len(args))
        devices = _devices_of(args[found[0]], rows_axis) if found else 1
        return Plan(step, args, keywords, found, rows_axis, devices)
    if keywords:  # as the step itself does, so that a named batch is a batch
        bound = inspect.signature(step.fn).bind(*args, **keywords)
        args, keywords = bound.args, bound.kwargs
    mesh: Mesh = step.mesh
    described = [
        _batch(step, arg) if i in step.batch_argnums else _replicated(arg, mesh)
        for i, arg in enumerate(args)
    ]
    if described and 0 not in step.batch_argnums:
        described[0] = step.lay_out(described[0])
    keywords = _replicated(keywords, mesh)
    devices = mesh.shape[step.axis_name]
    return Plan(step, tuple(described), keywords, step.batch_argnums, 0, devices)


def _as_it_lies(leaf: Any) -> Any:
    if not tree.is_array(leaf):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.committed:
        return _describe(leaf, leaf.sharding)
    return _describe(leaf, None)


def _replicated(values: Any, mesh: Mesh) -> Any:
    """Values as they would be placed by a copy; placed leaves as they are."""

    def describe(leaf: Any) -> Any:
        if tree.is_static(leaf):
            return leaf
        if _lies_on(leaf, mesh):
            return _describe(leaf, leaf.sharding)
        return _describe(tree.as_host(leaf), sharding.replicated(mesh))

    return jax.tree.map(describe, values)


def _batch(step: Any, batch: Any) -> Any:
    """A batch as the step would split it."""
    leaves = jax.tree.leaves(batch)
    mesh = step.mesh
    if all(_lies_on(leaf, mesh) for leaf in leaves):
        return _replicated(batch, mesh)
    train_step = step.fn if isinstance(step.fn, TrainStep) else None
    multiple = mesh.shape[step.axis_name] * getattr(train_step, "accumulate", 1)
    rows = placement.count_rows(batch)
    left, where = rows % multiple, sharding.rows(mesh, step.axis_name)
    if left and step.remainder == "error":
        step.place_batch(batch)  # raises, in the usual words
    if left and step.remainder == "unsplit":
        where = sharding.replicated(mesh)
    elif left:
        rows += multiple - left if step.remainder == "pad" else -left

    def describe(leaf: Any) -> Any:
        leaf = tree.as_host(leaf)
        if tree.is_static(leaf) or not getattr(leaf, "shape", ()):
            return _replicated(leaf, mesh)
        described = _describe(leaf, where)
        shape = (rows, *described.shape[1:])
        return jax.ShapeDtypeStruct(shape, described.dtype, sharding=where)

    described = jax.tree.map(describe, batch)
    if step.remainder == "pad" and not isinstance(batch, MaskedBatch):
        mask = jax.ShapeDtypeStruct((rows,), jax.numpy.float32, sharding=where)
        return MaskedBatch(described, mask)
    return described


def _lies_on(leaf: Any, mesh: Mesh) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):  # an array to come
        return leaf.sharding is not None
    return isinstance(leaf, jax.Array) and sharding.on_mesh(leaf, mesh)


def _describe(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    # A placed array may have been donated: its values are gone, its type is not.
    kind = leaf if isinstance(leaf, jax.Array) else jax.eval_shape(lambda x: x, leaf)
    weak = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=where, weak_type=weak)


def _devices_of(batch: Any, rows_axis: int) -> int:
    """Over how many devices a described batch is spread."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())]
    if rows_axis:  # stacked, one row a device
        return leaves[0].shape[0] if leaves else 1
    placed = [leaf.sharding for leaf in leaves if getattr(leaf, "sharding", None)]
    return max((len(where.device_set) for where in placed), default=1)
