"""A training step made from a loss and an optimizer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.fixed_order import COMPILER_OPTIONS
from lockstep.metrics import Mean
from lockstep.notices import say_once
from lockstep.packing import Packed, unpack
from lockstep.placement import MaskedBatch, count_rows
from lockstep.reduce import axis_size
from lockstep.rng import check_key, device_key, step_key
from lockstep.step import fixed_shards as fixed
from lockstep.step import model_state as statistics
from lockstep.step import scaling
from lockstep.step.accumulate import Sums, sum_gradients
from lockstep.step.gradients import average, clip
from lockstep.step.loss import Loss
from lockstep.step.outcome import Outcome, evaluate_loss
from lockstep.step.packed import PackingChoice, pack_slices, pack_state, update
from lockstep.step.scaling import DynamicScale
from lockstep.step.sharded import Layout, Slices, Whole
from lockstep.step.train_state import (
    TrainState,
    check_belongs,
    check_params,
    keep_types,
    move_ema,
    select,
    settle,
    start_ema,
)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A training step: `(state, batch[, key]) -> (state, metrics)`.

    In the global view it is an ordinary function of a state and a whole batch; in the
    device view it runs on one shard, inside `lockstep.per_device` or `jax.shard_map`.

    The metrics are those of the loss, each a `Mean`; `loss`, a `Mean`; `grad_norm`, the
    norm of the averaged gradient before clipping, unless it is not wanted; with a
    dynamic loss scale also `loss_scale` and `skipped` (0 or 1), and `grad_norm` is then
    a `Mean` without the skipped steps.

    A batch in which nothing counts (all masks zero) has loss 0 and gradient 0, and is
    a step like any other. A skipped step leaves parameters, optimizer, averages and
    model state as they were; only `step` moves on, so that no key is drawn twice.
    """

    loss: Loss
    optimizer: Any
    axis_name: str | None
    accumulate: int
    clip_norm: float | None
    loss_scale: DynamicScale | float | None
    ema: float | None
    batch_norm: str | None
    rows: str | None
    grad_norm: bool
    mask: str | None
    fixed_shards: int | None = None
    optimizer_sharding: str | None = None
    mesh: Mesh | None = None

    __name__ = "train_step"

    @functools.cached_property
    def _packing_of(self) -> PackingChoice:
        sliced = self.optimizer_sharding is not None
        return PackingChoice(self.optimizer, sliced=sliced)

    @functools.cached_property
    def _shares(self) -> Whole:
        """Who updates what."""
        if self.optimizer_sharding is None:
            return Whole(self.axis_name)
        if self.axis_name is not None:
            return Slices(self.axis_name)
        return Layout(self.mesh, self.optimizer_sharding) if self.mesh else Whole(None)

    def on_mesh(self, mesh: Mesh) -> "TrainStep":
        """The step as it is traced for a mesh."""
        if self.optimizer_sharding is None or self.axis_name is not None:
            return self
        return dataclasses.replace(self, mesh=mesh)

    @property
    def view(self) -> str:
        """`"global"` or `"device"`."""
        return "global" if self.axis_name is None else "device"

    @property
    def takes_key(self) -> bool:
        """Whether the loss draws: it then needs a key in the state or at each call."""
        return self.loss.key is not None

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What `jax.jit` has to be given; `lockstep.per_device` does."""
        return COMPILER_OPTIONS if self.fixed_shards else None

    def parts_on_each(self, devices: int) -> int:
        """How many parts the rows of one device fall into: microbatches of shards."""
        shards = self.fixed_shards or devices
        return self.accumulate * fixed.shards_on_each(shards, devices)

    def init(
        self, params: Any, *, model_state: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """Make the state of step 0.

        Arrays of `params` and `model_state` are taken over without a copy; a step that
        donates the state takes them with it unless the state was placed by a copy.

        Args:
            params: a tree of float arrays.
            model_state: the loss's own state, if it has one.
            key: the base key of the run; without it each call needs a key.

        Raises:
            TypeError: a parameter that has no gradient, or something that is no key.
            ValueError: a state or key that the loss does not take, or a missing state.
        """
        check_params(params)
        params = settle(params)
        if self.loss.model_state != (model_state is not None):
            wants = "takes" if self.loss.model_state else "takes no"
            raise ValueError(
                f"init was called with{'' if model_state is not None else 'out'} "
                f"model_state, and the loss {wants} model_state (make_train_step("
                f"model_state={self.loss.model_state}))"
            )
        if key is not None:
            self._check_takes(key)
        opt_state = self.optimizer.init(params)
        _say_multi_steps(opt_state)
        scale = self.loss_scale
        dynamic = scaling.start(scale) if isinstance(scale, DynamicScale) else None
        return settle(
            TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=opt_state,
                model_state=model_state,
                key=key,
                loss_scale=dynamic,
                ema=None if self.ema is None else start_ema(params),
            )
        )

    def __call__(
        self, state: TrainState, batch: Any, key: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One step.

        Args:
            state: from `init` or from the step before.
            batch: a tree of `[B, ...]` arrays or a `MaskedBatch`; in the device view
                the rows of this device.
            key: the key of this very step, if the state holds no base key.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"the state is {type(state).__name__}, not a TrainState: make it with "
                "step.init(params)"
            )
        carried = self.carry(state)
        if carried is not state:
            new, metrics = self(carried, batch, key)
            return unpack(new), metrics
        self._check_parts(state)
        key = self._key_of(state, key)
        sums = self._sums(state, batch, key)
        devices = 1 if self.axis_name is None else axis_size(self.axis_name)
        rows = count_rows(batch) // self.parts_on_each(devices)

        def finish(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, Any]]:
            weight = sums.loss.count / rows
            grads = average(sums.grads, weight, self._scale_of(state))
            return self._advance(state, self._shares.own(grads), sums)

        if self.fixed_shards:
            return fixed.seal_update(finish, state, sums)
        return finish(state, sums)

    def carry(self, state: TrainState, devices: int | None = None) -> TrainState:
        """The form in which the state goes from call to call: packed, or as it is.

        Args:
            state: an ordinary state, or a carried one.
            devices: how many there are; needed where the optimizer's state is cut.

        Raises:
            ValueError: the optimizer's state cannot be cut into slices.
        """
        if self.axis_name is None or isinstance(state.params, Packed):
            return state
        made_here = state.carried_by(self)
        if made_here is not None:
            return made_here
        packing = self._packing_of(state)
        if self.optimizer_sharding is not None:
            return pack_slices(state, packing, devices)
        return state if isinstance(packing, str) else pack_state(state, packing)

    def show(self, carried: TrainState) -> TrainState:
        """An ordinary state over a carried one; it unpacks what somebody looks at."""
        if isinstance(carried.params, Packed):
            return TrainState.over(carried, self)
        return carried

    def why_unpacked(self, state: TrainState) -> str | None:
        """Why the small leaves of a state are not packed; `None` where they are.

        Example:
            >>> import optax
            >>> from lockstep.step import make_train_step
            >>> step = make_train_step(lambda w, x: w * x, optax.sgd(0.1))
            >>> step.why_unpacked(step.init(jnp.ones(())))
            'the step is of the global view, where the compiler sums the gradients'
        """
        if self.axis_name is None:
            return (
                "the step is of the global view, where the compiler sums the gradients"
            )
        packing = self._packing_of(state)
        return f"the optimizer {packing}" if isinstance(packing, str) else None

    def _check_parts(self, state: TrainState) -> None:
        """Refuse the state of a step with other options, or of other parameters."""
        if not isinstance(state.params, Packed):
            check_belongs(state, self.optimizer)
        wanted = {
            "model_state": self.loss.model_state,
            "loss_scale": isinstance(self.loss_scale, DynamicScale),
            "ema": self.ema is not None,
        }
        for name, want in wanted.items():
            if want != (getattr(state, name) is not None):
                found = "is None, but needed" if want else "is there, but not used"
                raise ValueError(
                    f"state.{name} {found}: the state was made by a step with other "
                    "options; make it with this step's init, or set the same options"
                )

    def _key_of(self, state: TrainState, key: Any) -> Any:
        """The key of this step on this device."""
        if state.key is not None and key is not None:
            raise ValueError(
                "the state holds a base key and the call gives one too: use one of them"
            )
        if key is not None:
            self._check_takes(key)
        elif state.key is not None:
            key = step_key(state.key, state.step)
        elif self.takes_key:
            raise ValueError(
                f"the loss takes a key ({self.loss.key!r}) and there is none: use "
                "step.init(params, key=jax.random.key(seed)), or give each call a key"
            )
        if key is None or self.axis_name is None or self.fixed_shards:
            return key  # the key of the step; each fixed shard folds in its number
        axis_size(self.axis_name)
        return device_key(key, self.axis_name)

    def _check_takes(self, key: Any) -> None:
        if not self.takes_key:
            raise ValueError(
                "the loss takes no key, and one was given: let the loss take it as its "
                "last argument, or leave it out"
            )
        check_key(key)

    def _scale_of(self, state: TrainState) -> Any:
        return state.loss_scale.value if state.loss_scale else self.loss_scale

    def _sums(self, state: TrainState, batch: Any, key: Any) -> Sums:
        """The sums over microbatches and devices, after one reduction."""
        scale = self._scale_of(state)

        def objective(*args: Any) -> tuple[jax.Array, Outcome]:
            value, outcome = self._evaluate(*args)
            return value if scale is None else value * scale, outcome

        args = state.params, state.model_state, batch, key
        if self.axis_name is None:
            return sum_gradients(objective, *args, self.accumulate)
        devices = axis_size(self.axis_name)
        if self.fixed_shards:
            return fixed.sum_shards(
                objective,
                args,
                self.accumulate,
                shards=self.fixed_shards,
                axis_name=self.axis_name,
                step=state.step,
                differs=self._differs(args),
            )
        sums = sum_gradients(objective, *args, self.accumulate)
        differs = self._differs(args)
        shares = statistics.shares(sums.model_state, differs, devices)
        grads, (loss, metrics, means) = self._shares.sum(
            sums.grads, (sums.loss, sums.metrics, shares)
        )
        equal = statistics.with_means(sums.model_state, differs, means)
        return Sums(grads, loss, metrics, equal)

    def _evaluate(self, *args: Any) -> tuple[jax.Array, Outcome]:
        """One microbatch: `(params, model_state, batch, key)` to sums."""
        parts = self.accumulate > 1 or self.axis_name is not None
        args = unpack(args[0]), *args[1:]
        return evaluate_loss(self.loss, *args, mask_name=self.mask, parts=parts)

    def _differs(self, args: tuple[Any, Any, Any, Any]) -> list[bool]:
        """Which leaves of the model state differ between devices; if they may."""
        if not self.loss.model_state or self.axis_name is None:
            return []

        def forward(*args: Any) -> Any:
            return self._evaluate(*args)[1].model_state

        if isinstance(args[2], MaskedBatch) and not self.fixed_shards:
            statistics.check_padding(forward, args, self.axis_name)
        differs = statistics.differing(forward, *args, self.axis_name)
        if self.fixed_shards:
            fixed.check_statistics(args[1], differs, self.batch_norm)
        else:
            statistics.check_policy(args[1], differs, self.batch_norm, self.axis_name)
        return differs

    def _advance(
        self, state: TrainState, grads: Any, sums: Sums
    ) -> tuple[TrainState, dict[str, Any]]:
        """Update everything, or leave it where a gradient is not finite."""
        norm = self._shares.norm(grads)
        metrics = {"loss": sums.loss, **sums.metrics, "grad_norm": norm}
        moved = self._update(state, clip(grads, norm, self.clip_norm), sums)
        if isinstance(self.loss_scale, DynamicScale) and state.loss_scale:
            finite = jnp.isfinite(norm)  # equal on all devices, after the reduction
            scale = scaling.move(self.loss_scale, state.loss_scale, finite)
            moved = select(finite, moved, state)
            moved = dataclasses.replace(moved, loss_scale=scale)
            taken = finite.astype(norm.dtype)
            metrics["grad_norm"] = Mean(jnp.where(finite, norm, 0), taken)
            metrics["loss_scale"] = state.loss_scale.value
            metrics["skipped"] = 1 - taken
        if not self.grad_norm:  # then nothing computes what nobody needs
            del metrics["grad_norm"]
        return dataclasses.replace(moved, step=state.step + 1), metrics

    def _update(self, state: TrainState, grads: Any, sums: Sums) -> TrainState:
        """The state after the optimizer's step."""
        import optax

        params = self._shares.own(state.params)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, opt_state = update(
            self.optimizer, grads, state.opt_state, params, sums.loss.compute()
        )
        params = self._shares.all(optax.apply_updates(params, updates), state.params)
        params = keep_types(state.params, params, "state.params")
        ema = state.ema
        if self.ema is not None:
            ema = move_ema(ema, params, self.ema)
        return dataclasses.replace(
            state,
            params=params,
            opt_state=keep_types(state.opt_state, opt_state, "state.opt_state"),
            model_state=sums.model_state,
            ema=ema,
        )


def _say_multi_steps(opt_state: Any) -> None:
    """Steps of unequal weight, merged by optax, are a mean of means."""
    import optax

    def accumulates(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    if any(map(accumulates, jax.tree.leaves(opt_state, is_leaf=accumulates))):
        say_once(
            "optax.MultiSteps",
            "optax.MultiSteps averages the means of its steps, which is wrong where "
            "they count unequal numbers of rows or tokens: use accumulate=k",
        )
