"""`Trainer`: the training loop, as a call (`fit`) or as a generator (`steps`)."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.checkpoint import Checkpointer
from lockstep.loop import contract
from lockstep.loop.batch_rows import rows_of
from lockstep.loop.feed import Feed
from lockstep.loop.running import Callback, Running, checked
from lockstep.loop.saving import saving
from lockstep.loop.step_keys import StepKeys
from lockstep.metrics import compute
from lockstep.notices import say_once
from lockstep.parallel import as_parallel
from lockstep.transfers import NoTransfers
from lockstep.tree import is_gone


@dataclass(slots=True, eq=False)
class StepInfo:
    """One finished step, as callbacks and the body of a loop see it.

    Attributes:
        step: how many steps are finished, this one included.
        epoch: the pass over the batches, from 1.
        metrics: what the step returned, still on the devices.
        rows: rows of the global batch, padding included.
        seconds: wall time since the step before was handed to the devices; under
            `steps_per_call` the share of this step.
        compiled: whether the step was compiled for this batch.
        call: the numbers of the steps that were handed over together; just this one
            without `steps_per_call`.
        call_metrics: the metrics of each step of `call`, still on the devices.
        results: numbers on the host that callbacks found at this step, such as
            `valid/loss`; later callbacks see those of earlier ones.
    """

    step: int
    epoch: int
    metrics: Any
    rows: int
    seconds: float
    compiled: bool
    call: range
    call_metrics: list[Any]
    trainer: "Trainer" = field(repr=False)
    results: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> Any:
        """The state after this step, until the next step begins.

        Raises:
            RuntimeError: the next step has begun, and the memory was given to it.
        """
        if self.step != self.trainer.step:
            inside = self.step != self.call[-1]
            raise RuntimeError(
                f"the state of step {self.step} was donated to step {self.step + 1}: "
                + (
                    f"steps {self.call[0]} to {self.call[-1]} are one call "
                    "(steps_per_call); look at the state where the call has ended"
                    if inside
                    else "read info.state before the next iteration, or use "
                    "trainer.state"
                )
            )
        return self.trainer.state

    def scalars(self) -> dict[str, float]:
        """The metrics as numbers. This waits for the devices: not in every step."""
        self.trainer._hint_at_reads(self.step)
        return compute(self.metrics)


class Trainer:
    """Runs a step over batches, with callbacks; holds the newest state.

    Args:
        step: `(state, batch[, key]) -> (state, metrics)`: a plain function, or what
            `make_train_step`, `parallelize` or `per_device` returned.
        mesh: the devices; all of them when `None`.
        key: a base key. A step with a third argument gets `step_key(key, i)` in it,
            where `i` counts the finished steps: 0 for the first step.
        callbacks: called after each step, in this order; see `callbacks`.
        checkpoints: where the run is saved. One whose directory holds a checkpoint goes
            on from there, whatever state and batches it is started with, and `steps`
            or `epochs` then mean the whole run. SIGTERM and SIGINT end it after a step,
            saved.
        remainder: what to do with rows that do not divide, as in `parallelize`.
        steps_per_call: how many steps are handed to the devices together. Worth it for
            steps of a millisecond or less, whose time is that of starting them. The
            training is the same; callbacks are called, and the loop gets its turn,
            after each call, with `info.call_metrics`; `Log` writes every step. The
            first call, the last steps of an epoch that fill no
            call, and steps of another form run one by one.
        max_compiles: raise instead of compiling more often than this, the program of
            `steps_per_call` not counted.
        transfer_guard: "error" refuses what is moved to the devices in every step
            without being asked for: by the step (the error names the argument) and by
            the callbacks. The body of your own loop is not guarded.
        clock: seconds, for `info.seconds`.

    Attributes:
        step: how many steps are finished.
        total: the step at which the run will end, `None` where it cannot be known.
        parallel: the step as it runs on the devices of `mesh`.

    Example:
        >>> import jax.numpy as jnp
        >>> def step(w, x):
        ...     loss, grad = jax.value_and_grad(lambda w: ((w - x) ** 2).mean())(w)
        ...     return w - 0.5 * grad, {"loss": loss}
        >>> trainer = Trainer(step)
        >>> batches = [jnp.full(8, 1.0), jnp.full(8, 3.0)]
        >>> float(trainer.fit(jnp.zeros(()), batches, epochs=5))
        3.0
        >>> for info in trainer.steps(trainer.state, batches, steps=2):
        ...     print(info.step, info.scalars())
        11 {'loss': 4.0}
        12 {'loss': 4.0}
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        mesh: Mesh | None = None,
        key: jax.Array | None = None,
        callbacks: Iterable[Callback] = (),
        checkpoints: Checkpointer | None = None,
        remainder: str | None = None,
        steps_per_call: int = 1,
        max_compiles: int | None = None,
        transfer_guard: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.parallel = as_parallel(step, mesh, remainder)
        self.mesh: Mesh = self.parallel.mesh
        self.callbacks = tuple(
            checked(callback, f"callbacks[{i}]") for i, callback in enumerate(callbacks)
        )
        contract.check_count("steps_per_call", steps_per_call)
        self.steps_per_call = steps_per_call
        self.step = 0
        self.total: int | None = None
        self._state: Any = None
        key = contract.key_for(self.parallel.fn, key)
        self._keys = None if key is None else StepKeys(key, self.mesh)
        self.checkpoints = checkpoints
        self._saving = saving(checkpoints, key)
        self._clock = clock
        self._last_read = 0
        self._guarded = _check_guard(transfer_guard)
        if self._guarded:
            self.parallel.observers.append(NoTransfers())
        if max_compiles is not None:
            self.parallel.compiles.max_compiles = max_compiles

    @property
    def state(self) -> Any:
        """The newest state; valid until the next step begins.

        Raises:
            RuntimeError: there is none: nothing was trained yet, or a step failed
                after it had taken over the memory of the state.
        """
        if self._state is None:
            raise RuntimeError("no state yet: call fit(state, batches) or steps(...)")
        if any(map(is_gone, jax.tree.leaves(self._state))):
            raise RuntimeError(
                f"the state after step {self.step} is gone: step {self.step + 1} took "
                "over its memory and failed. Start again from a checkpoint, or make "
                "the step with donate_argnums=()"
            )
        return self._state

    def fit(
        self,
        state: Any,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> Any:
        """Train, and return the state.

        Args:
            state: any pytree; host arrays are placed by a copy. With the state of the
                run before, `info.step` goes on counting; with another, it starts at 1.
            batches: an iterable of batches. One that can be iterated again (a list, a
                loader) starts again each epoch; an iterator is read once, and not
                further than needed.
            steps: how many steps to run, over as many epochs as that takes.
            epochs: how many passes over the batches; 1 if neither is given.

        Raises:
            ValueError: nothing to do, both `steps` and `epochs`, or an empty iterable.
            RuntimeError: an iterator ended before `steps`. The state that was reached
                is `trainer.state`, and the callbacks have finished.
            TypeError: the step does not return `(state, metrics)`.
        """
        for _ in self.steps(state, batches, steps=steps, epochs=epochs):
            pass
        return self.state

    def steps(
        self,
        state: Any,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> Generator[StepInfo, None, None]:
        """Train, and yield after each step; arguments and errors as in `fit`.

        The callbacks have seen the step when it is yielded. Leaving the loop ends the
        run in good order.
        """
        feed = Feed(
            batches,
            self.parallel,
            steps,
            epochs,
            at_a_time=self.steps_per_call,
            strict=self._saving.strict,
        )
        return self._run(state, feed)

    def _run(self, state: Any, feed: Feed) -> Generator[StepInfo, None, None]:
        """The loop."""
        with self._saving as saves:
            self._begin(state, feed)
            with Running(self.callbacks) as callbacks, closing(iter(feed)) as batches:
                callbacks.start(self, self._state)
                for epoch, group in batches:
                    infos = self._advance(epoch, group)
                    with self._guard():
                        stop = callbacks(infos)
                    saves.after(infos)
                    yield infos[-1]
                    if stop or saves.asked():
                        return
            feed.check_complete()

    def _begin(self, state: Any, feed: Feed) -> None:
        fresh = state is not self._state or state is None
        if fresh:
            self.step = 0
        self._state = self._saving.begin(self, state, feed, fresh=fresh)
        began = self.step - feed.done
        self.total = None if feed.total is None else began + feed.total
        self._checked = False
        self._last_time = self._clock()

    def _advance(self, epoch: int, batches: list[Any]) -> list[StepInfo]:
        """Hand one call's steps to the devices; nothing here waits for them."""
        compiles, first = self.parallel.compiles.count, self.step + 1
        try:
            metrics = self._run_steps(batches)
        except Exception as error:
            error.add_note(f"in step {first} (epoch {epoch})")
            raise
        metrics = [contract.by_name(found) for found in metrics]
        self.step += len(batches)
        then, self._last_time = self._last_time, self._clock()
        return [
            StepInfo(
                step=first + i,
                epoch=epoch,
                metrics=metrics[i],
                rows=rows_of(batch),
                seconds=(self._last_time - then) / len(batches),
                compiled=self.parallel.compiles.count > compiles,
                call=range(first, self.step + 1),
                call_metrics=metrics,
                trainer=self,
            )
            for i, batch in enumerate(batches)
        ]

    def _run_steps(self, batches: list[Any]) -> list[Any]:
        """Move the state by one step a batch; the metrics of each."""
        calls = [(b, *self._key_argument(i)) for i, b in enumerate(batches)]
        if self._checked and len(calls) == self.steps_per_call > 1:
            self._state, metrics = self.parallel.several(self._state, calls)
            return metrics
        metrics = []
        for call in calls:
            out = self.parallel(self._state, *call)
            if not self._checked:
                contract.check_output(self._state, out)
                self._checked = True
            self._state, found = out
            metrics.append(found)
        return metrics

    @contextmanager
    def _guard(self) -> Generator[None, None, None]:
        """No transfer to the devices or between them that nobody asked for."""
        if not self._guarded:
            yield
            return
        to_device = jax.transfer_guard_host_to_device("disallow")
        with to_device, jax.transfer_guard_device_to_device("disallow"):
            try:
                yield
            except jax.errors.JaxRuntimeError as error:
                if "Disallowed" in str(error):
                    error.add_note(
                        "transfer_guard='error': make the value once, before the "
                        "training, or ask for the move with jax.device_put"
                    )
                raise

    def _key_argument(self, ahead: int) -> tuple[jax.Array, ...]:
        return () if self._keys is None else (self._keys[self.step + ahead],)

    def _hint_at_reads(self, step: int) -> None:
        if step > 1 and self._last_read == step - 1:
            say_once(
                "Trainer reads every step",
                "the metrics are read after every step, and each time the devices "
                "wait for it: read info.scalars() every n steps, or use "
                "every(n, Log(...)), which does not wait",
            )
        self._last_read = step


def _check_guard(transfer_guard: str | None) -> bool:
    if transfer_guard not in (None, "error"):
        raise ValueError(f"transfer_guard={transfer_guard!r}; it is None or 'error'")
    return transfer_guard == "error"
