"""`every(n, callback)`: the same callback, at each n-th step only."""

from typing import Any

from lockstep.loop import StepInfo
from lockstep.loop.running import Callback, checked, name_of


class Every:
    """Made by `every`."""

    def __init__(self, n: int, callback: Callback) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"every({n!r}, ...): n is a number of steps, at least 1")
        self.n = n
        self.callback = checked(callback, f"the callback of every({n}, ...)")
        self.__name__ = f"every({n}, {name_of(callback)})"
        for method in ("start", "observe", "finish", "close"):
            if hasattr(callback, method):
                setattr(self, method, getattr(callback, method))
        self.each_step = getattr(callback, "each_step", False)

    def __call__(self, info: StepInfo) -> Any:
        """Call the callback if it is its turn."""
        steps = [info.step] if self.each_step else info.call
        turn = any(step % self.n == 0 for step in steps)
        return self.callback(info) if turn else None


def every(n: int, callback: Callback) -> Every:
    """Call a callback after the steps n, 2n, 3n and so on.

    Under `Trainer(steps_per_call=k)`: after the call in which such a step was; `Log`
    and `Plot`, which only need the metrics, at the very step.
    Its `start`, `observe`, `finish` and `close` are called as if it stood alone: `Log`
    hears of each step and writes each n-th.

    Raises:
        ValueError: `n` is not a positive whole number.
        TypeError: `callback` is no callback.

    Example:
        >>> from types import SimpleNamespace
        >>> say = every(2, lambda info: print("step", info.step))
        >>> for step in (1, 2, 3, 4):
        ...     say(SimpleNamespace(step=step, call=[step]))
        step 2
        step 4
    """
    return Every(n, callback)
