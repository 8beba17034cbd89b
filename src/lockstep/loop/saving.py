"""The checkpoints of a run: from the newest one on, and to a last one at its end."""

import logging
from contextlib import ExitStack
from typing import Any

import jax

from lockstep.checkpoint import Checkpointer
from lockstep.checkpoint.saved import Saved
from lockstep.distributed.agreement import agree
from lockstep.distributed.session import group_of
from lockstep.loop.feed import Feed
from lockstep.loop.resuming import Resuming
from lockstep.preemption import Preempted, StopSignals

_log = logging.getLogger("lockstep")


def saving(checkpoints: Checkpointer | None, key: jax.Array | None) -> Any:
    """What saves the runs of a Trainer with this base key, or nothing that does.

    Raises:
        TypeError: `checkpoints` is no `Checkpointer`.
    """
    if checkpoints is None:
        return NotSaving()
    if not isinstance(checkpoints, Checkpointer):
        raise TypeError(
            f"checkpoints={checkpoints!r} is a {type(checkpoints).__name__}: say "
            "checkpoints=Checkpointer('run/checkpoints', every=1000)"
        )
    return Saving(checkpoints, key)


def _require_same(checkpoints: Checkpointer | None, trainer: Any) -> None:
    """All processes save together: one that does not would leave the others waiting."""
    agree(
        repr(checkpoints),
        group_of(trainer.mesh),
        what="checkpoints= of the Trainer",
        cure="Give every process the same, on one directory that all of them see (not "
        "only the main process, and no name with the time in it): one copy is written",
        show=str,
    )


class NotSaving:
    """What a Trainer without a `Checkpointer` has in place of `Saving`."""

    strict = False

    def begin(self, trainer: Any, state: Any, feed: Feed, *, fresh: bool) -> Any:
        """The state that was given, on the devices."""
        _require_same(None, trainer)
        return trainer.parallel.place_state(state)

    def after(self, infos: list[Any]) -> None:
        """Nothing."""

    def asked(self) -> bool:
        """Never: signals do what they always do."""
        return False

    def __enter__(self) -> "NotSaving":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Saving:
    """Saves the runs of one Trainer, and ends them when a signal asks for it.

    As a context it is one run. Left in good order, it saves the last step and waits
    until that is on the disk; left by an error, it waits for the save under way.
    """

    _trainer: Any
    _feed: Any
    _info: Any  # of the step that was finished last

    def __init__(self, checkpoints: Checkpointer, key: jax.Array | None) -> None:
        self.strict = checkpoints.strict
        self._checkpoints = checkpoints
        self._resuming = Resuming(checkpoints, key)
        self._last: int | None = None  # the step that is saved
        self._signals = StopSignals()
        self._signal: str | None = None
        self._run = ExitStack()
        self._forget()

    def begin(self, trainer: Any, state: Any, feed: Feed, *, fresh: bool) -> Any:
        """The state to go on with, on the devices; `feed` is put where it stood.

        Args:
            trainer: its step is set to that of the state.
            state: what the run was given.
            feed: the batches of this run, not yet read.
            fresh: whether the state is not the one that this Trainer has reached.

        Raises:
            RuntimeError: another process saves elsewhere, at other steps or not at all.
        """
        _require_same(self._checkpoints, trainer)
        self._checkpoints.own()
        if fresh:
            state = self._resuming.state(trainer, state)
            self._last = trainer.step or None
        else:
            state = trainer.parallel.place_state(state)
        self._resuming.batches(trainer, feed)
        self._feed, self._trainer = feed, trainer
        return state

    def after(self, infos: list[Any]) -> None:
        """Save if it is time, after a call of one or several steps."""
        self._info = infos[-1]
        self._checkpoints.check()
        due = any(step % self._checkpoints.every == 0 for step in self._info.call)
        if due or self._checkpoints.improves(self._info.results):
            self._save()

    def asked(self) -> bool:
        """Whether a signal asks the run to stop after this step."""
        self._signal = self._signals.asked(self._info.step)
        return self._signal is not None

    def __enter__(self) -> "Saving":
        self._signals = self._run.enter_context(StopSignals())
        self._signal = None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._run.pop_all():
            try:
                if kind in (None, GeneratorExit):
                    self._finish()
                elif isinstance(error, Exception):  # a second SIGINT does not wait
                    self._keep_what_is_saved(error)
            finally:
                self._checkpoints.release()
                self._forget()

    def _finish(self) -> None:
        if self._info is not None and self._info.step != self._last:
            self._save()
        self._checkpoints.finish()
        signal = self._signal or self._signals.asked(self._last or 0)
        if signal is not None:
            raise self._stopped(signal)

    def _stopped(self, signal: str) -> BaseException:
        if self._last is None:
            message = f"{signal}: the run ended before its first step"
        else:
            message = (
                f"{signal}: the run ended after step {self._last} and is saved in "
                f"{self._checkpoints.directory / str(self._last)}; start it again, and "
                "it goes on from there"
            )
        if signal == "SIGINT":
            return KeyboardInterrupt(message)
        _log.warning(message)  # an exit code ends Python without a word
        return Preempted(message)

    def _keep_what_is_saved(self, error: Exception) -> None:
        """Wait for the save under way; a failure of it is told beside the error."""
        try:
            self._checkpoints.wait()
        except RuntimeError as failure:
            error.add_note(f"then also: {failure}")

    def _save(self) -> None:
        info, position = self._info, self._feed.position()
        facts = self._resuming.facts(self._trainer, self._feed)
        results = {name: float(value) for name, value in info.results.items()}

        def saved(leaves: dict[str, Any]) -> Saved:
            return Saved(info.step, leaves, position=position, results=results, **facts)

        self._checkpoints.write(self._trainer.state, saved)
        self._last = info.step

    def _forget(self) -> None:
        """Hold nothing of a run that has ended: its batches, its trainer, its state."""
        self._trainer = self._feed = self._info = None
