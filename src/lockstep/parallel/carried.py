"""The state between two calls: its small leaves in vectors, and shown as they are.

Each leaf that goes in and out of a compiled program costs some microseconds a device. A
`TrainStep` in the device view therefore takes and returns packed states, and whoever
calls it sees ordinary ones, which unpack themselves when somebody looks.
"""

from typing import Any

from lockstep.parallel.options import Options
from lockstep.step import TrainState, TrainStep


class Carrier:
    """Turns states into what the program takes, and back; other values pass."""

    def __init__(self, options: Options) -> None:
        """Of a step that carries its state in another form, or of any other."""
        self._step = options.fn if isinstance(options.fn, TrainStep) else None

    def known(self, state: Any) -> Any:
        """What a state is a view over; `None` where it is an ordinary value."""
        if self._step is None or not isinstance(state, TrainState):
            return None
        return state.carried_by(self._step)

    def seen(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the state that the last call carried on, at no cost."""
        carried = self.known(args[0]) if args else None
        return args if carried is None else (carried, *args[1:])

    def carry(self, placed: tuple[Any, ...]) -> tuple[Any, ...]:
        """Placed arguments with the state packed, if it was not before."""
        if self._step is None or not isinstance(placed[0], TrainState):
            return placed
        return (self._step.carry(placed[0]), *placed[1:])

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
