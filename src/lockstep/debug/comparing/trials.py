"""One call of a step on a few devices, from host values to host values.

A comparison runs the same call on several meshes, so the arguments are read to the host
once; nothing that the caller holds is donated or changed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from lockstep import placement, tree
from lockstep.devices import make_mesh
from lockstep.jaxprs.varying import equations, inner_jaxprs
from lockstep.parallel import program
from lockstep.parallel.arguments import check_alive
from lockstep.parallel.parallel_step import ParallelStep
from lockstep.parallel.static_leaves import wrap
from lockstep.parallel.views import key_shape
from lockstep.placement import MaskedBatch
from lockstep.replicas import first_mismatch
from lockstep.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, on the host."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def with_argument(self, i: int, value: Any) -> "Call":
        """The same call with another argument `i`."""
        return Call((*self.args[:i], value, *self.args[i + 1 :]), self.keywords)


@dataclasses.dataclass(frozen=True)
class Output:
    """One leaf that a step returned.

    Attributes:
        path: `state['w']`, `metrics['loss']`.
        value: NumPy; typed keys as their words.
        in_state: whether it belongs to the new state.
        copies_differ: whether the devices hold different copies of it.
    """

    path: str
    value: np.ndarray
    in_state: bool
    copies_differ: bool


@dataclasses.dataclass(frozen=True)
class Body:
    """What one device runs in the device view.

    Attributes:
        jaxpr: the user's step; the leaves of the new state come first in its outputs.
        varies: for each input, whether it differs between devices.
        axis: the name of the axis in the step's own collectives.
    """

    jaxpr: core.Jaxpr
    varies: list[bool]
    axis: str


class Trial:
    """A step on `count` devices of this process."""

    def __init__(self, step: ParallelStep, count: int) -> None:
        """Take the step to its own mesh; nothing runs yet."""
        self.count = count
        self.step = step.on(_mesh(step, count), compare_replicas=False)

    def __call__(self, call: Call) -> list[Output]:
        """Run the step and read all its outputs."""
        outputs = self.step(*self.arguments(call), **call.keywords)
        return [
            Output(path, as_numbers(placement.to_host(leaf)), in_state, differs)
            for path, leaf, in_state, differs in self._named(call, outputs)
            if not tree.is_static(leaf)
        ]

    def dependent_rows(self, call: Call) -> list[str]:
        """How the rows of one device meet in the loss of a train step, in words."""
        if self.step.view == "global" or not isinstance(self.step.fn, TrainStep):
            return []
        return self.step.dependent_rows(*self.arguments(call), **call.keywords)

    def jaxpr(self, call: Call) -> core.Jaxpr:
        """The whole program."""
        return self.step.trace(*self.arguments(call), **call.keywords).jaxpr.jaxpr

    def body(self, call: Call) -> Body | None:
        """What one device runs; `None` in the global view, which is one program."""
        if self.step.view == "global":
            return None
        outer = self.jaxpr(call)
        eqn = next(e for e in equations(outer) if e.primitive.name == "shard_map")
        (inner,) = inner_jaxprs(eqn)
        pairs = zip(eqn.invars, inner.invars, strict=True)
        place = self.step.mesh.axis_names.index(self.step.axis_name)
        return Body(
            inner,
            [
                np.shape(outside.aval) != np.shape(inside.aval)
                for outside, inside in pairs
            ],
            eqn.params["mesh"].axis_names[place],
        )

    def arguments(self, call: Call) -> list[Any]:
        """The arguments; of keys that are given out one a device, the first ones."""
        if self.step.view == "global":
            return list(call.args)

        def first(leaf: Any) -> Any:
            many = tree.is_array(leaf) and len(key_shape(leaf, "key") or ()) == 1
            return leaf[: self.count] if many else leaf

        special = (0, *self.step.batch_argnums)
        return [
            arg if i in special else jax.tree.map(first, arg)
            for i, arg in enumerate(call.args)
        ]

    def _named(self, call: Call, out: Any) -> list[tuple[str, Any, bool, bool]]:
        """Outputs as (path, leaf, in_state, copies_differ)."""
        state = None if 0 in self.step.batch_argnums else call.args[0]
        kind = jax.eval_shape(lambda x: x, wrap(state))
        at = program.find_state(kind, wrap(out))
        new = out if at == "all" else out[0] if at == "first" else ()
        odd = _odd_leaves(new) if self.step.view == "device" else set()
        named = [(p, x, True, p in odd) for p, x in tree.named_leaves(new, "state")]
        rest = {"output": out} if at is None else {}
        if at == "first":
            names = ["metrics"] if len(out) == 2 else _numbered(len(out))
            rest = dict(zip(names, out[1:], strict=True))
        for name, values in rest.items():
            named += [(p, x, False, False) for p, x in tree.named_leaves(values, name)]
        return named


def read_call(
    step: ParallelStep, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Call:
    """A caller's arguments, as host values; padding is left for the step to redo.

    Raises:
        RuntimeError: a leaf was donated to an earlier call.
    """
    for i, arg in enumerate(args):
        name = "state" if i == 0 else f"argument {i}"
        check_alive(arg, "batch" if i in step.batch_argnums else name)
    args = jax.tree.map(_host_leaf, args)
    if step.remainder == "pad":
        args = tuple(_unpad(x) if isinstance(x, MaskedBatch) else x for x in args)
    return Call(args, jax.tree.map(_host_leaf, keywords))


def map_batches(step: ParallelStep, call: Call, change: Callable[[Any], Any]) -> Call:
    """The call with each batch argument changed."""
    for i in step.batch_argnums:
        call = call.with_argument(i, change(call.args[i]))
    return call


def parts_on_each(step: ParallelStep, devices: int) -> int:
    """By which number each device's rows must divide: microbatches, fixed shards."""
    made = isinstance(step.fn, TrainStep)
    return step.fn.parts_on_each(devices) if made else 1


def as_numbers(leaf: Any) -> np.ndarray:
    """A leaf as NumPy; keys as their words."""
    return np.asarray(jax.random.key_data(leaf) if tree.is_key(leaf) else leaf)


def _mesh(step: ParallelStep, count: int) -> Mesh:
    """A mesh with the axes of the step's own, all of size 1 but that of the rows."""
    platform = step.mesh.devices.flat[0].platform
    devices = jax.local_devices(backend=platform)
    if count > len(devices):
        raise ValueError(
            f"comparing on {count} devices needs {count}, and this process has "
            f"{len(devices)} ({platform}): call lockstep.simulate_devices({count}) "
            "before anything else of JAX, or name other counts in devices="
        )
    rows = step.axis_name
    axes = {name: count if name == rows else 1 for name in step.mesh.axis_names}
    return make_mesh(axes, devices=devices[:count])


def _host_leaf(leaf: Any) -> Any:
    if getattr(leaf, "weak_type", False) and not leaf.shape:
        return leaf.item()  # a Python number is weak again on the next mesh
    return placement.to_host(tree.as_host(leaf))


def _unpad(batch: MaskedBatch) -> Any:
    return placement.take_rows(batch.data, np.flatnonzero(batch.mask))


def _numbered(count: int) -> list[str]:
    return [f"output[{i}]" for i in range(1, count)]


def _odd_leaves(state: Any) -> set[str]:
    """Paths of the leaves whose copies differ between devices."""
    if first_mismatch(state) is None:
        return set()
    return {
        path
        for path, leaf in tree.named_leaves(state, "state")
        if isinstance(leaf, jax.Array) and first_mismatch(leaf) is not None
    }
