"""`make_train_step`: its options, checked."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from lockstep.step import fixed_shards as fixed
from lockstep.step.loss import Loss
from lockstep.step.scaling import DynamicScale, read_loss_scale
from lockstep.step.train_step import TrainStep


def make_train_step(
    loss: Callable[..., Any],
    optimizer: Any,
    *,
    model_state: bool = False,
    axis_name: str | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    loss_scale: DynamicScale | float | str | None = None,
    ema: float | None = None,
    remat: bool | Callable[..., Any] = False,
    batch_norm: str | None = None,
    rows: str | None = None,
    grad_norm: bool = True,
    optimizer_sharding: str | None = None,
    mask: str | None = "mask",
    fixed_shards: int | None = None,
) -> TrainStep:
    """Make the training step of a loss and an optimizer.

    The step averages by sums and counts, so that microbatches and devices with unequal
    numbers of rows or tokens give what one device gives on the whole batch.

    Args:
        loss: `(params, batch[, key])` to `loss` or `(loss, metrics)`; with
            `model_state=True` `(params, model_state, batch[, key])` to
            `loss, (metrics, model_state)`. The loss is a scalar (the mean of its
            rows), one value a row `[B]`, or `Mean(total, count)`; so is each metric in
            the (nested) dict `metrics`.
        optimizer: an optax `GradientTransformation`.
        model_state: whether the loss carries a state of its own, as BatchNorm does.
        axis_name: `None` for the global view; the mesh axis for the device view, where
            the step sees one shard and reduces once, after accumulation.
        accumulate: how many microbatches make one step; rows must divide by it.
        clip_norm: the greatest global norm of the averaged gradient.
        loss_scale: `"dynamic"` or a `DynamicScale` for float16, which skips steps whose
            gradients are not finite; a number for a fixed scale, which never skips.
        ema: the decay of a moving average of the parameters, kept in float32.
        remat: recompute activations in the backward pass; a function is the policy of
            `jax.checkpoint`.
        batch_norm: `"local"` allows, in the device view, statistics of each device's
            own rows; they are averaged over the devices.
        rows: `"local"` allows, in the device view or with `accumulate`, a loss in which
            the rows of one device, fixed shard or microbatch meet (negatives, ranks or
            norms among its own rows) or add up.
        grad_norm: whether the norm of the gradient is among the metrics. It takes a
            look at every gradient: a few percent of the step of a wide, shallow model.
        optimizer_sharding: a mesh axis, as `"data"`: each device holds a share of the
            optimizer's state and updates that share of the parameters. In the device
            view the optimizer must treat every number alike; see the guide.
        mask: where a batch that is a dict holds its mask. A mask `[B]` weighs the rows
            of scalars and of `[B]` values; a finer one is for the loss to use, with
            `Mean.of(values, mask)`.
        fixed_shards: for the device view: split every global batch into so many
            shards, a power of two that the devices divide, and get the same bits on
            every number of devices. Random draws and BatchNorm are those of a shard.

    Returns:
        A `TrainStep`; `TrainStep.init` makes its state.

    Raises:
        TypeError: the loss, the optimizer or an option is of the wrong kind.
        ValueError: an option is out of range.

    Example:
        >>> import jax, optax
        >>> import jax.numpy as jnp

        >>> def loss(params, batch):
        ...     return (params["w"] * batch["x"] - batch["y"]) ** 2
        >>> step = make_train_step(loss, optax.sgd(0.1))
        >>> state = step.init({"w": jnp.zeros(())})
        >>> batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([1.0, 2.0])}
        >>> state, metrics = jax.jit(step)(state, batch)
        >>> f"{metrics['loss']:.2f} {state.params['w']:.2f}"
        '2.50 0.50'
    """
    _check_optimizer(optimizer)
    _check_options(axis_name, accumulate, clip_norm, ema, batch_norm, model_state)
    _check_parts(axis_name, accumulate, rows, fixed_shards, optimizer_sharding)
    read = Loss.read(loss, model_state)
    if remat is True or callable(remat):
        policy = remat if callable(remat) else None
        read = dataclasses.replace(read, fn=jax.checkpoint(loss, policy=policy))
    return TrainStep(
        loss=read,
        optimizer=optimizer,
        axis_name=axis_name,
        accumulate=accumulate,
        clip_norm=clip_norm,
        loss_scale=read_loss_scale(loss_scale),
        ema=ema,
        batch_norm=batch_norm,
        rows=rows,
        grad_norm=grad_norm,
        mask=mask,
        fixed_shards=fixed_shards,
        optimizer_sharding=optimizer_sharding,
    )


def _check_optimizer(optimizer: Any) -> None:
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            raise TypeError(
                f"the optimizer is {type(optimizer).__name__} without {name}(): give "
                "an optax GradientTransformation such as optax.adamw(1e-3)"
            )


def _check_options(
    axis_name: Any,
    accumulate: Any,
    clip_norm: Any,
    ema: Any,
    batch_norm: Any,
    model_state: bool,
) -> None:
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(f"axis_name={axis_name!r} is not the name of a mesh axis")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"accumulate={accumulate!r} is not a number of microbatches")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}; a step has 1 microbatch or more")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm!r} must be above 0, or None")
    if ema is not None and not 0 < ema < 1:
        raise ValueError(f"ema={ema!r} is a decay between 0 and 1, such as 0.999")
    if batch_norm not in (None, "local"):
        raise ValueError(f"batch_norm={batch_norm!r} must be 'local' or None")
    if batch_norm and (axis_name is None or not model_state):
        raise ValueError(
            "batch_norm='local' is for the device view of a loss with "
            "model_state=True: in the global view BatchNorm sees the whole batch"
        )


def _check_parts(
    axis_name: str | None,
    accumulate: int,
    rows: Any,
    fixed_shards: Any,
    optimizer_sharding: Any,
) -> None:
    _check_sharding(optimizer_sharding, axis_name, fixed_shards)
    fixed.check_option(fixed_shards, axis_name)
    _check_rows(rows, axis_name, accumulate)


def _check_sharding(
    optimizer_sharding: Any, axis_name: str | None, fixed_shards: int | None
) -> None:
    if optimizer_sharding is None:
        return
    if not isinstance(optimizer_sharding, str):
        raise TypeError(
            f"optimizer_sharding={optimizer_sharding!r} is not the name of a mesh axis"
        )
    if axis_name not in (None, optimizer_sharding):
        raise ValueError(
            f"optimizer_sharding={optimizer_sharding!r} and axis_name={axis_name!r}: "
            "in the device view both are the axis that the step reduces over"
        )
    if fixed_shards is not None:
        raise ValueError(
            "optimizer_sharding cannot be combined with fixed_shards: the slices of "
            "the update depend on the number of devices, and so may their last bits"
        )


def _check_rows(rows: Any, axis_name: str | None, accumulate: int) -> None:
    if rows not in (None, "local"):
        raise ValueError(f"rows={rows!r} must be 'local' or None")
    if rows and axis_name is None and accumulate == 1:
        raise ValueError(
            "rows='local' is for the device view (axis_name=) or accumulate=: in the "
            "global view the loss sees the whole batch"
        )
