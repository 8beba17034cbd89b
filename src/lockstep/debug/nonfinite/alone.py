"""A step on one device: the same for steps of lockstep and for `compat.pmap`.

A call is read to the host, and from there any device's part of it, or any choice of
its rows, runs alone: again and again, and traced.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core

from lockstep import placement, tree
from lockstep.debug.comparing.trials import Call, Trial, map_batches, read_call
from lockstep.parallel import ParallelStep, program
from lockstep.parallel.static_leaves import unwrap, wrap

# The path of an output that is watched, and its value on the host.
Output = tuple[str, np.ndarray]


class Alone(Protocol):
    """A step of which any device's part can run by itself.

    Attributes:
        name: of the user's function.
        batch_argnums: the arguments that hold the rows.
    """

    name: str
    batch_argnums: tuple[int, ...]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call on the host."""
        ...

    def devices(self, call: Call) -> Sequence[Any]:
        """The devices, in the order of their rows."""
        ...

    def part(self, call: Call, position: int) -> Call:
        """One device's part of a call."""
        ...

    def rows(self, part: Call) -> int:
        """The rows of a part; 0 where there are none."""
        ...

    def first_row(self, call: Call, position: int) -> int:
        """The number of a part's first row, in the batch that the caller gave."""
        ...

    def pick(self, part: Call, rows: Sequence[int]) -> Call:
        """A part with these of its rows, in place of all."""
        ...

    def row_values(self, part: Call) -> list[Any]:
        """What has rows in a part: arrays with the rows on axis 0."""
        ...

    def run(self, part: Call) -> list[Output]:
        """Run a part on one device: the new state, and all scalars."""
        ...

    def trace(self, part: Call) -> tuple[core.ClosedJaxpr, list[Any]]:
        """The program of a part, and the leaves that it is run on."""
        ...


def alone(step: Any) -> Alone:
    """The form of a step that can run on one device."""
    return StepAlone(step) if isinstance(step, ParallelStep) else PmapAlone(step)


class StepAlone:
    """A step of `parallelize` or `per_device`."""

    def __init__(self, step: ParallelStep) -> None:
        """Nothing runs yet."""
        self._step, self._trial = step, Trial(step, 1)
        self.name = step.compiles.name
        self.batch_argnums = step.batch_argnums

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call on the host, without padding."""
        return read_call(self._step, args, kwargs)

    def devices(self, call: Call) -> Sequence[Any]:
        """The first device of each part of the rows that is not all padding."""
        mesh = self._step.mesh
        rows = mesh.axis_names.index(self._step.axis_name)
        grid = np.moveaxis(mesh.devices, rows, 0)
        first = grid.reshape(grid.shape[0], -1)[:, 0]
        count = self.rows(call)
        used = [self.first_row(call, i) < (count or 1) for i in range(len(first))]
        return list(first[used])

    def part(self, call: Call, position: int) -> Call:
        """One device's rows of the batch; all else as it is."""
        first = self.first_row(call, position)
        stop = self.first_row(call, position + 1)
        return map_batches(
            self._step, call, lambda b: placement.take_rows(b, slice(first, stop))
        )

    def rows(self, part: Call) -> int:
        """The rows of the batch."""
        if not self.batch_argnums:
            return 0
        return placement.count_rows(part.args[self.batch_argnums[0]])

    def first_row(self, call: Call, position: int) -> int:
        """Rows lie in blocks of equal size, the last ones filled up by padding."""
        count = self._step.mesh.shape[self._step.axis_name]
        return min(position * -(-self.rows(call) // count), self.rows(call))

    def pick(self, part: Call, rows: Sequence[int]) -> Call:
        """A part with these of its rows."""
        index = np.asarray(rows)
        return map_batches(self._step, part, lambda b: placement.take_rows(b, index))

    def row_values(self, part: Call) -> list[Any]:
        """The leaves of the batch."""
        batches = [part.args[i] for i in self.batch_argnums]
        return [x for x in jax.tree.leaves(batches) if np.ndim(x)]

    def run(self, part: Call) -> list[Output]:
        """The new state, and scalar outputs."""
        return [
            (o.path, o.value)
            for o in self._trial(self._filled(part))
            if o.in_state or not o.value.shape
        ]

    def trace(self, part: Call) -> tuple[core.ClosedJaxpr, list[Any]]:
        """The whole program, in the device view with its map over one device."""
        part = self._filled(part)
        args = list(self._trial.arguments(part))
        for i in self.batch_argnums:
            args[i] = self._trial.step.place_batch(args[i])
        # The program's own leaves: it may take the state in another form than args has.
        taken = self._trial.step.taken(*args, **part.keywords)
        traced = self._trial.step.trace(*args, **part.keywords)
        return traced.jaxpr, jax.tree.leaves(taken)

    def _filled(self, part: Call) -> Call:
        """Rows are repeated until fixed shards or microbatches divide them."""
        rows, multiple = self.rows(part), self._trial.step.layout.multiple
        if rows % multiple == 0:
            return part
        return self.pick(part, [i % rows for i in range(rows + -rows % multiple)])


class PmapAlone:
    """A function of `compat.pmap`: each argument has an axis of devices."""

    def __init__(self, mapped: Any) -> None:
        """Nothing runs yet."""
        self.batch_argnums: tuple[int, ...] = (1,)
        self._alone = mapped.alone
        self.name = mapped.compiles.name

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call on the host."""
        args, kwargs = jax.tree.map(_host_leaf, (args, kwargs))
        return Call(args, kwargs)

    def devices(self, call: Call) -> Sequence[Any]:
        """The devices of this process."""
        return self._alone.devices(self._alone.size(call.args, call.keywords))

    def part(self, call: Call, position: int) -> Call:
        """One device's part, with an axis of size 1."""
        return Call(*self._alone.part(position, call.args, call.keywords))

    def rows(self, part: Call) -> int:
        """The size of the second axis of the batch."""
        sizes = {len(x) for x in self.row_values(part)}
        return sizes.pop() if len(sizes) == 1 else 0

    def first_row(self, call: Call, position: int) -> int:
        """Rows are counted from 0 on each device, as the caller stacked them."""
        del call, position
        return 0

    def pick(self, part: Call, rows: Sequence[int]) -> Call:
        """A part with these of its rows."""
        index = np.asarray(rows)

        def take(leaf: Any) -> Any:
            with_rows = tree.is_array(leaf) and len(leaf.shape) > 1
            return leaf[:, index] if with_rows else leaf

        return part.with_argument(1, jax.tree.map(take, part.args[1]))

    def row_values(self, part: Call) -> list[Any]:
        """The leaves of the batch, without the axis of devices."""
        leaves = jax.tree.leaves(part.args[1:2])
        return [x[0] for x in leaves if tree.is_array(x) and len(x.shape) > 1]

    def run(self, part: Call) -> list[Output]:
        """The new state, and outputs that are scalars on each device."""
        out = self._alone(self.devices(part)[0], part.args, part.keywords)
        return [
            (path, np.asarray(leaf)) for path, leaf in watched(part.args, out, rank=1)
        ]

    def trace(self, part: Call) -> tuple[core.ClosedJaxpr, list[Any]]:
        """The mapped function over one device."""
        values = (part.args, part.keywords)
        leaves, structure = jax.tree.flatten(wrap(values))
        device = self.devices(part)[0]

        def run(leaves: list[Any]) -> Any:
            return self._alone(device, *unwrap(jax.tree.unflatten(structure, leaves)))

        return jax.make_jaxpr(run)(leaves), leaves


def watched(args: tuple[Any, ...], outputs: Any, rank: int) -> list[tuple[str, Any]]:
    """The outputs to look at: the new state, and others of at most this rank."""
    at = _state_at(args, outputs)
    rest = () if at == "all" else outputs[1:] if at == "first" else outputs
    if at == "first" and len(rest) == 1:
        rest = rest[0]
    others = [
        (path, leaf)
        for path, leaf in tree.named_leaves(rest, "metrics" if at else "output")
        if np.ndim(leaf) <= rank
    ]
    found = tree.named_leaves(new_state(args, outputs), "state") + others
    return [(path, leaf) for path, leaf in found if is_inexact(leaf)]


def new_state(args: tuple[Any, ...], outputs: Any) -> Any:
    """The new state among the outputs; `None` where there is none."""
    at = _state_at(args, outputs)
    return outputs if at == "all" else outputs[0] if at == "first" else None


def _state_at(args: tuple[Any, ...], outputs: Any) -> str | None:
    state = args[0] if args else None
    kind = jax.eval_shape(lambda x: x, wrap(state))
    return program.find_state(kind, wrap(outputs))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf can hold NaN at all."""
    if not tree.is_array(leaf) or tree.is_key(leaf):
        return isinstance(leaf, float | complex)
    return jax.numpy.issubdtype(leaf.dtype, np.inexact)


def _host_leaf(leaf: Any) -> Any:
    return placement.to_host(tree.as_host(leaf))
