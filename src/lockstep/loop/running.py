"""The callbacks of one run: started, called in order, and always closed."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Callback(Protocol):
    """Anything that can be called with the info of a step.

    Return `True` to stop the training after this step. Callbacks are called in the
    order of the list. Four methods are optional:

    - `start(trainer, state)` before the first step;
    - `observe(info)` after every step, before any callback is called: also for a
      callback inside `every(n, ...)`, and for each step of a call of several;
    - `finish(info)` after the last step, unless the training failed;
    - `close()` at the very end, also after a failure.

    Under `Trainer(steps_per_call=k)` a callback is called once for k steps, with the
    last of them. One with the attribute `each_step = True` is called for every step; it
    reads `info.metrics`, for only the last step of a call has an `info.state`.

    With several processes all of them run the callbacks.
    """

    def __call__(self, info: Any, /) -> Any:
        """After a step."""
        ...


class Running:
    """A context in which callbacks run; an error names the callback and the step."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._observers = [c for c in self._callbacks if hasattr(c, "observe")]
        self._started: list[Callback] = []
        self._last: Any = None

    def __enter__(self) -> "Running":
        return self

    def start(self, trainer: Any, state: Any) -> None:
        """Start each callback that has something to start."""
        for callback in self._callbacks:
            self._started.append(callback)  # one that fails half-way is closed too
            self._optional(callback, "start", trainer, state)

    def __call__(self, infos: list[Any]) -> bool:
        """Show the steps of a call to all callbacks; whether one wants to stop."""
        self._last = info = infos[-1]
        stop = False
        callback: Any = None
        try:
            for info in infos:
                for callback in self._observers:
                    callback.observe(info)
                for callback in self._callbacks:
                    if info is infos[-1] or getattr(callback, "each_step", False):
                        stop = bool(callback(info)) or stop
        except Exception as error:
            error.add_note(f"in {name_of(callback)} at step {info.step}")
            raise
        return stop

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failures: list[BaseException] = []
        if kind in (None, GeneratorExit) and self._last is not None:
            failures += self._each("finish", self._last)
        failures += self._each("close")
        if error is not None and kind is not GeneratorExit:
            for failure in failures:
                error.add_note(f"then also: {failure!r}")
        elif failures:
            raise failures[0]

    def _each(self, method: str, *args: Any) -> list[BaseException]:
        """Call a method of all callbacks, whichever of them fail."""
        failures: list[BaseException] = []
        for callback in self._started:
            try:
                self._optional(callback, method, *args)
            except Exception as failure:
                failures.append(failure)
        return failures

    def _optional(self, callback: Any, method: str, *args: Any) -> None:
        call: Callable[..., Any] | None = getattr(callback, method, None)
        if call is None:
            return
        try:
            call(*args)
        except Exception as error:
            step = f" (last step {self._last.step})" if self._last else ""
            error.add_note(f"in {name_of(callback)}, {method}{step}")
            raise


def checked(callback: Any, where: str) -> Callback:
    """The callback, if it is one.

    Raises:
        TypeError: it cannot be called, or is a class in place of an instance.

    Example:
        >>> checked(print, "callbacks[0]")
        <built-in function print>
    """
    if isinstance(callback, type):
        raise TypeError(
            f"{where} is the class {callback.__name__}: make one, {callback.__name__}()"
        )
    if not callable(callback):
        raise TypeError(
            f"{where} is a {type(callback).__name__}, and a callback is a function of "
            "the step's info"
        )
    return callback


def name_of(callback: Any) -> str:
    """How a callback is called in messages.

    Example:
        >>> name_of(print)
        'print'
    """
    return getattr(callback, "__name__", type(callback).__name__)
