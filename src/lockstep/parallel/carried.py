"""The state between two calls: its small leaves in vectors, and shown as they are.

Each leaf that goes in and out of a compiled program costs some microseconds a device. A
`TrainStep` in the device view therefore takes and returns packed states, and whoever
calls it sees ordinary ones, which unpack themselves when somebody looks. With
`optimizer_sharding` each device holds its share of the optimizer's state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep import placement, sharding, tree
from lockstep.parallel.options import Options
from lockstep.step import TrainState, TrainStep
from lockstep.step.sharded import specs


class Carrier:
    """Turns states into what the program takes, and back; other values pass."""

    def __init__(self, options: Options) -> None:
        """Of a step that carries its state in another form, or of any other."""
        self._step = options.fn if isinstance(options.fn, TrainStep) else None
        self._mesh, self._axis = options.mesh, options.row_axis

    def known(self, state: Any) -> Any:
        """What a state is a view over; `None` where it is an ordinary value."""
        if self._step is None or not isinstance(state, TrainState):
            return None
        return state.carried_by(self._step)

    def seen(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the state that the last call carried on, at no cost."""
        carried = self.known(args[0]) if args else None
        return args if carried is None else (carried, *args[1:])

    def lay_out(self, state: Any) -> Any:
        """An ordinary state with the optimizer's part split, if it shall be."""
        step = self._step
        if step is None or not step.optimizer_sharding:
            return state
        if not isinstance(state, TrainState):
            return state
        # In the device view the mesh may have another name for the step's axis.
        axis = step.optimizer_sharding if step.view == "global" else self._axis

        def split(path: str, leaf: Any) -> Any:
            if tree.is_static(leaf):
                return leaf
            where = sharding.split(self._mesh, axis, tuple(jnp.shape(leaf)))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return _described(leaf, where)
            if getattr(leaf, "sharding", None) == where:
                return leaf
            return placement.copy_to(leaf, where, path)

        opt_state = placement.map_named(split, state.opt_state, "state.opt_state")
        return dataclasses.replace(state, opt_state=opt_state)

    def carry(self, placed: tuple[Any, ...]) -> tuple[Any, ...]:
        """Placed arguments with the state packed, if it was not before.

        Descriptions of arrays (`jax.ShapeDtypeStruct`) become descriptions.
        """
        step, state = self._step, placed[0] if placed else None
        if step is None or step.view == "global" or not isinstance(state, TrainState):
            return placed
        if self.known(state) is not None:
            return self.seen(placed)
        devices = self._mesh.shape[self._axis]
        described = any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)
        )
        if step.optimizer_sharding:  # what is split there is cut anew
            state = self._regard(state, sharding.auto(self._mesh))
        if described:
            carried = jax.eval_shape(lambda state: step.carry(state, devices), state)
        else:
            carried = step.carry(state, devices)
        if described or (carried is not state and step.optimizer_sharding):
            carried = jax.tree.map(self._put, carried, specs(carried, self._axis))
        return (self._regard(carried, self._mesh), *placed[1:])

    def _regard(self, state: Any, mesh: Mesh) -> Any:
        return jax.tree.map(lambda leaf: sharding.regard(leaf, mesh), state)

    def _put(self, leaf: Any, spec: PartitionSpec) -> Any:
        """A leaf of a carried state where the step wants it."""
        where = NamedSharding(sharding.auto(self._mesh), spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return _described(leaf, where)
        if not spec or leaf.sharding == where:
            return leaf
        return jax.jit(lambda x: x, out_shardings=where)(leaf)

    def show(self, outputs: Any) -> Any:
        """Outputs `(state, ...)` with an ordinary state."""
        if self._step is None or not isinstance(outputs, tuple):
            return outputs
        return (self.show_state(outputs[0]), *outputs[1:])

    def show_state(self, state: Any) -> Any:
        """The ordinary state over a carried one."""
        if self._step is None or not isinstance(state, TrainState):
            return state
        return self._step.show(state)


def _described(leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> Any:
    weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)
