"""`nan_guard`: sees the first step whose loss or state is not finite.

The steps run in blocks. Before a block the state is copied, and the batches are held;
behind a block one look at its last state and its metrics, made on the devices, says
whether all went well. If not, the block runs again, step by step, from the copy.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import distributed, observers, placement, tree
from lockstep.debug.comparing.trials import Call
from lockstep.debug.nonfinite import record
from lockstep.debug.nonfinite.alone import alone, is_inexact, new_state, watched
from lockstep.debug.nonfinite.diagnosis import (
    NonFinite,
    NonFiniteError,
    describe,
    diagnose,
)
from lockstep.notices import say_once
from lockstep.parallel import ParallelStep, as_parallel
from lockstep.parallel.run_ahead import MAX_IN_FLIGHT


def nan_guard(step: Any, directory: str | Path = "run", *, every: int = 1) -> Any:
    """Stop at the first step with NaN or infinity in its state or its scalars.

    The error says the step, the leaves, the device, the process and the rows of the
    batch, and the line that made it; the call is saved below `directory`, and
    `lockstep replay` repeats it. Values that were not finite before the first step are
    not watched. In a `Trainer`, `callbacks.NanGuard` does the same.

    Args:
        step: a plain step, a `TrainStep`, what `parallelize`, `per_device` or
            `compat.pmap` returned.
        directory: for the folder `nan_step_120`.
        every: look once in so many steps. 1 waits for the devices and copies the state
            in every step; with more the error comes up to `every + 2` steps late,
            still with the right step, and no step waits.

    Returns:
        The step, to be called as before.

    Raises:
        NonFiniteError: when it is called; `.report` holds what is known.

    Example:
        >>> step = nan_guard(lambda w, x: (w, jnp.log(x).mean()))
        >>> step(0.0, np.ones(8, np.float32))[1].item()
        0.0
    """
    if not hasattr(step, "observers"):
        step = as_parallel(step)

    def stop(report: NonFinite) -> None:
        raise NonFiniteError(report)

    step.observers.append(Guard(step, directory, every, stop))
    return step


@dataclasses.dataclass
class _Block:
    """Some steps after one another, and what is needed to run them again.

    Attributes:
        state: a copy of the state before the first of them.
        calls: their other arguments.
        first: the number of the first of them.
        scalars: the watched outputs of each step that are no state.
        outputs: all watched outputs, of a block of one step.
        state_flags: paths of the last state, and whether each holds a bad value.
    """

    state: Any
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    first: int
    scalars: list[Any] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    state_flags: Any = None


class Guard:
    """An observer of one step; made by `nan_guard` and by `callbacks.NanGuard`.

    Args:
        step: the step that it observes.
        directory: where calls are saved.
        every: steps in a block.
        found: gets the report; it may raise.
        done: steps that were finished before.
    """

    def __init__(
        self,
        step: Any,
        directory: str | Path,
        every: int,
        found: Callable[[NonFinite], None],
        done: int = 0,
    ) -> None:
        """Nothing is copied yet."""
        if every < 1:
            raise ValueError(f"nan_guard: every={every}; it is at least 1")
        self._step, self._directory = step, Path(directory)
        if jax.process_count() > 1 and not isinstance(step, ParallelStep):
            every = 1  # a process that repeats a compat.pmap would wait for the others
        self._every, self._found, self._done = every, found, done
        self._block: _Block | None = None
        self._behind: _Block | None = None
        self._last: tuple[Any, Any] = (None, None)
        self._ignored: set[str] | None = None
        self._idle = False
        self._given: Any = None

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the state at the start of a block; hold the other arguments."""
        if self._idle:
            return
        state, rest = (args[0], args[1:]) if args else (None, ())
        if self._ignored is None:
            self._ignored = _bad_from_the_start(state)
        if self._block is not None and not self._follows(state):
            self._end_block()  # the caller went on from another state
        if self._block is None:
            self._block = _Block(_copy(state), [], self._done + 1)
        self._given = state
        self._block.calls.append(_hold((rest, kwargs), everything=self._every == 1))

    def after(self, step: Any, outputs: Any) -> None:
        """Note the scalars; at the end of a block ask the devices about the state."""
        if self._idle or self._block is None:
            return
        self._done += 1
        leaves = watched((self._block.state,), outputs, rank=self._rank)
        state = [pair for pair in leaves if pair[0].startswith("state")]
        self._block.scalars.append([p for p in leaves if p not in state])
        self._last = _first_leaf(self._given), _first_leaf(outputs)
        self._given = None
        if len(self._block.calls) >= self._every:
            self._block.state_flags = [p for p, _ in state], _bad([x for _, x in state])
            if self._every == 1:
                self._block.outputs = leaves
            self._end_block()
            if self._every == 1:
                self._look()
        elif self._behind and len(self._block.calls) >= MAX_IN_FLIGHT:
            self._look()

    def finish(self) -> None:
        """Look at all steps that were not looked at yet."""
        self._look()
        self._end_block()
        self._look()

    @property
    def _rank(self) -> int:
        return 0 if isinstance(self._step, ParallelStep) else 1

    def _follows(self, state: Any) -> bool:
        """Whether a state is the one that came out, or (to evaluate) that went in."""
        leaf = _first_leaf(state)
        return any(leaf is known for known in self._last)

    def _end_block(self) -> None:
        if self._behind is not None:
            self._look()
        self._block, self._behind = None, self._block

    def _look(self) -> None:
        """Was the block before this one all right? The devices are done with it."""
        block, self._behind = self._behind, None
        if block is None or self._idle:
            return
        paths, flags = block.state_flags or ((), ())
        bad = {p for p, f in zip(paths, jax.device_get(flags), strict=True) if f}
        scalars = [pair for pairs in block.scalars for pair in pairs]
        values = jax.device_get([x for _, x in scalars])
        named = [(p, v) for (p, _), v in zip(scalars, values, strict=True)]
        if describe(named) or bad - (self._ignored or set()):
            self._idle = True  # it has found what it was for
            with observers.unseen():
                report = self._repeat(block)
            self._found(report)

    def _repeat(self, block: _Block) -> NonFinite:
        """Run a block again, and say all about its first bad step."""
        state = block.state
        for i, (rest, kwargs) in enumerate(block.calls):
            number = block.first + i
            if problem := _gone(rest, kwargs):
                return self._unexplained(number, problem)
            leaves, outputs = block.outputs, None
            if not leaves:
                call = (_copy(state), *rest) if rest or state is not None else ()
                outputs = self._step(*call, **kwargs)
                leaves = watched((state,), outputs, rank=self._rank)
            values = [
                (path, placement.to_host(leaf))
                for path, leaf in leaves
                if path not in (self._ignored or ())
            ]
            if describe(values):
                return self._explain(number, (state, *rest), kwargs, values)
            new = new_state((state,), outputs)
            state = state if new is None else new
        return self._unexplained(
            block.first,
            f"it, or one of the {len(block.calls) - 1} steps after it, was not finite, "
            "and was when it ran again: the step is not deterministic, or the caller "
            "changed a batch afterwards",
        )

    def _explain(
        self, number: int, args: tuple[Any, ...], kwargs: Any, outputs: Any
    ) -> NonFinite:
        one = alone(self._step)
        call = one.read(args, kwargs)
        report = diagnose(one, call, number, outputs)
        folder = self._directory / f"nan_step_{number}"
        report = dataclasses.replace(report, directory=folder)
        if distributed.is_main_process():
            record.save(folder, one.name, number, call, str(report))
        return report

    def _unexplained(self, number: int, why: str) -> NonFinite:
        return NonFinite(number, self._step.compiles.name, (why,))


def _copy(values: Any) -> Any:
    """A copy where it lies, which a step may take over."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        if isinstance(leaf, jax.Array):  # on several processes only a program can
            return jax.jit(jnp.copy, out_shardings=leaf.sharding)(leaf)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(one, values)


def _hold(values: Any, everything: bool) -> Any:
    """The arguments as they are now, whatever the caller does with them later."""
    if everything:
        return _copy(values)
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, values)


def _first_leaf(values: Any) -> Any:
    return next(iter(jax.tree.leaves(values)), None)


@jax.jit
def _bad(leaves: list[jax.Array]) -> list[jax.Array]:
    """Whether each leaf holds NaN or infinity, found on its devices."""
    return [~jnp.isfinite(x).all() for x in leaves]


def _bad_from_the_start(state: Any) -> set[str]:
    named = [pair for pair in tree.named_leaves(state, "state") if is_inexact(pair[1])]
    flags = jax.device_get(_bad([x for _, x in named]))
    bad = {path for (path, _), flag in zip(named, flags, strict=True) if flag}
    if bad:
        say_once(
            f"not finite from the start: {sorted(bad)}",
            f"{', '.join(sorted(bad))}: not finite before the first step, so that "
            "nan_guard does not watch it",
        )
    return bad


def _gone(rest: Any, kwargs: Any) -> str | None:
    for path, leaf in record.named(Call((None, *rest), kwargs)).items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return (
                f"not finite here or in the steps after, and {path} was donated to the "
                "step: do not donate it, or use every=1, to see more"
            )
    return None
