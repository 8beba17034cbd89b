"""A run goes on where an earlier process left it: state, step, keys, batches."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax

from lockstep.checkpoint import Checkpointer
from lockstep.checkpoint.plan import KEEP, Plan, replan
from lockstep.checkpoint.saved import Saved, check_same_key, key_words
from lockstep.loop.feed import Feed
from lockstep.step import TrainState
from lockstep.step.conditions import changed, conditions

_log = logging.getLogger("lockstep")


class Resuming:
    """Brings the calls of `fit` of one Trainer to where they stood.

    A script may call `fit` several times. Its calls are counted, and a checkpoint knows
    in which of them it was made: when the script starts again, the calls before that
    one are passed over.

    Attributes:
        fit: the number of this call of `fit`, from 1.
        began: the step at which the call began, in the first process.
    """

    def __init__(self, checkpoints: Checkpointer, key: jax.Array | None) -> None:
        self._checkpoints, self._key = checkpoints, key
        self._saved: Saved | None = None
        self.fit = self.began = 0

    def state(self, trainer: Any, state: Any) -> Any:
        """The newest state of the directory in place of `state`, if there is one.

        Args:
            trainer: its step is set.
            state: as the run was given it.
        """
        self.fit, self._saved = 0, None
        if not self._checkpoints.take_over():
            return trainer.parallel.place_state(state)

        def check(saved: Saved, path: Path) -> None:
            check_same_key(saved.key, key_words(self._key), path)
            _check_conditions(saved, trainer.parallel.fn, path)

        # The placed state is dropped again: there need not be memory for two of them.
        described = jax.tree.map(_describe, trainer.parallel.place_state(state))
        found = self._checkpoints.newest(described, check=check, owned=True)
        assert found is not None  # it raises where none can be read
        self._saved, restored = found
        path = self._checkpoints.directory / str(self._saved.step)
        _check_state_key(restored, state, path)
        trainer.step = self._saved.step
        _log.warning("the run goes on after step %s, from %s", trainer.step, path)
        return trainer.parallel.place_state(restored)

    def batches(self, trainer: Any, feed: Feed) -> None:
        """Put the batches of the next call of `fit` where they stood."""
        self.fit, self.began = self.fit + 1, trainer.step
        saved = self._saved
        if saved is None or saved.fit < self.fit:
            return
        if saved.fit > self.fit:
            feed.skip()
            _log.warning("call %s of fit was complete: nothing to train", self.fit)
            return
        self.began = saved.began
        if saved.position is not None:
            feed.go_to(saved.position)
        if feed.is_complete or feed.done == feed.total:
            _log.warning("all %s steps were done: nothing to train", feed.done)
        elif saved.plan is not None:
            self._keep_rows(trainer, feed, saved.plan)
        if saved.plan is not None and saved.position is not None:
            now = self.plan(trainer, feed)
            trainer.parallel.pad_to(_padded_rows(saved.plan, saved.position, now))

    def _keep_rows(self, trainer: Any, feed: Feed, saved: Plan) -> None:
        """Refuse batches of other sizes than the policy asks for."""
        policy = KEEP if saved.fixed_shards else self._checkpoints.policy
        if policy is not None:
            feed.rows.want(_rows_to_keep(saved, self.plan(trainer, feed), policy))

    def plan(self, trainer: Any, feed: Feed) -> Plan:
        """How this run cuts its batches."""
        step = trainer.parallel
        return Plan(
            devices=step.mesh.shape[step.axis_name],
            rows=feed.rows.count,
            accumulate=getattr(step.fn, "accumulate", 1),
            step=trainer.step,
            total=None if feed.total is None else self.began + feed.total,
            epoch_rows=feed.epoch_rows,
            fixed_shards=getattr(step.fn, "fixed_shards", None),
        )

    def facts(self, trainer: Any, feed: Feed) -> dict[str, Any]:
        """What a checkpoint says of this run, beside state and position."""
        return {
            "fit": self.fit,
            "began": self.began,
            "key": key_words(self._key),
            "plan": self.plan(trainer, feed),
            "conditions": _conditions(trainer.parallel.fn, feed.rows.count),
        }


def _rows_to_keep(old: Plan, now: Plan, policy: str) -> int:
    """The rows that a batch of this run has to have; says what else changes."""
    if old.devices == now.devices:
        return old.rows
    if policy == KEEP and old.rows % now.devices:  # remainder="pad" may still run it
        _log.warning(
            "saved as %s; from here on %s devices, with as many rows", old, now.devices
        )
        return old.rows
    old = dataclasses.replace(old, step=now.step, total=now.total)
    change = replan(old, now.devices, policy)
    _log.warning("saved as %s; from here on\n%s", old, change.describe())
    return change.new.rows


def _padded_rows(old: Plan, position: dict[str, Any], now: Plan) -> int:
    """The rows that short batches were padded to before the stop.

    A short batch may be the first one after it. It has to get the shape that it had in
    the run that did not stop: sums and random masks depend on it, and so does whether
    the step is compiled again.
    """
    rows = now.rows or old.rows  # a list does not know its rows yet
    padded = position.get("rows", rows)
    return padded if rows == old.rows and padded % now.devices == 0 else rows


def _check_state_key(restored: Any, given: Any, path: Path) -> None:
    """Refuse a `TrainState` with another base key than that of the run.

    Raises:
        ValueError: the keys differ.
    """
    if isinstance(given, TrainState):
        before, now = key_words(restored.key), key_words(given.key)
        check_same_key(before, now, path)


def _conditions(step: Any, rows: int | None) -> dict[str, Any] | None:
    """What the bits of a step depend on, if it promises bits."""
    promises = getattr(step, "fixed_shards", None)
    return conditions(step, rows) if promises else None


def _check_conditions(saved: Saved, step: Any, path: Path) -> None:
    """Refuse to go on where the promised bits would not be the same.

    Raises:
        ValueError: lists each condition that changed.
    """
    rows = (saved.conditions or {}).get("global_batch")  # the batches are asked later
    now = _conditions(step, rows)
    if not saved.conditions or not now:
        return
    if different := changed(saved.conditions, now):
        raise ValueError(
            f"the run in {path} has fixed_shards, and gives the same bits only under "
            f"the conditions that it began with; changed are {'; '.join(different)}. "
            "Bring them back, or go on without fixed_shards"
        )


def _describe(leaf: Any) -> Any:
    """A leaf without its values, so that its memory is free for what is restored."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak
    )
