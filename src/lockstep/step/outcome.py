"""What a loss returned, read into sums that can be added.

A loss or metric is a scalar (the mean of its rows), one value a row, or
`Mean(total, count)`. Whatever it is, a train step needs two sums of each microbatch:
the total, and the count by which it divides once at the very end. What cannot be
added up without changing its meaning is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.metrics import Mean, is_value, join
from lockstep.reduce import widen
from lockstep.step.loss import Loss, describe
from lockstep.step.rows import Rows, open_batch
from lockstep.step.train_state import keep_types

# The names of the metrics that a train step adds.
ADDED = ("loss", "grad_norm", "loss_scale", "skipped")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """One microbatch's loss and metrics as sums, all in float32 or wider.

    Attributes:
        loss: the loss as a `Mean`.
        metrics: the user's metrics, each a `Mean`.
        model_state: as the loss returned it; `None` without one.
        empty: whether a mask left no row to a scalar loss, which is then 0/0 and has
            no gradient; `None` where that cannot be.
    """

    loss: Mean
    metrics: dict[str, Any]
    model_state: Any
    empty: jax.Array | None


def evaluate_loss(
    loss: Loss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: Any,
    *,
    mask_name: str | None,
    parts: bool,
) -> tuple[jax.Array, Outcome]:
    """Call the loss on one microbatch.

    Args:
        loss: the user's loss.
        params: what is differentiated.
        model_state: the state before; `None` without one.
        batch: a tree of `[B, ...]` arrays, or a `MaskedBatch` of one.
        key: the key of this microbatch, or `None`.
        mask_name: where a batch that is a dict holds its mask.
        parts: whether other microbatches or devices are to be added. Then a scalar
            that is no mean of rows would change its meaning, and is refused.

    Returns:
        What is differentiated, and the sums.
    """
    rows = open_batch(batch, mask_name)
    value, metrics, new_state = loss(params, model_state, rows.data, key)
    objective, mean = read_loss(value, rows, parts)
    scalar = _kind(value, rows) == "scalar"
    return objective, Outcome(
        loss=mean,
        metrics=read_metrics(metrics, rows, parts),
        model_state=keep_types(model_state, new_state, "model_state"),
        empty=rows.weight == 0 if scalar and rows.mask is not None else None,
    )


def read_loss(value: Any, rows: Rows, parts: bool) -> tuple[jax.Array, Mean]:
    """The scalar to differentiate, and the loss as a `Mean`.

    The scalar is the loss's total over the static number of rows, so that gradients in
    16 bits stay in range; a step corrects it by the counts, once, at the end.

    Raises:
        TypeError: the loss is not a float.
        ValueError: the loss has a shape that is none of the three, or is finer than
            its mask can weigh.
    """
    kind = _kind(value, rows)
    if kind is None:
        raise ValueError(
            f"the loss returned {describe(value)} for a batch of {rows.count} rows: "
            f"return a scalar, one value a row (shape [{rows.count}]), or "
            "Mean.of(values, mask)"
        )
    if not _is_float(value.total if kind == "mean" else value):
        raise TypeError(f"the loss is {describe(value)}; a gradient needs a float")
    if rows.finer and (kind == "rows" or (kind == "scalar" and parts)):
        what = "one value a row" if kind == "rows" else "a scalar"
        raise ValueError(
            f"the loss is {what}, and {rows.mask_path} of rank {rows.mask_rank} counts "
            "smaller things than rows, which cannot be weighed from outside: return "
            f"Mean.of(losses, {rows.mask_path}), or give make_train_step mask=None if "
            "this is no mask"
        )
    mean = _sums(value, kind, rows)
    if kind == "scalar":
        # Not the total over the rows: unmasked, the user's own loss is meant, exactly.
        return widen(value) * (rows.weight / rows.count), mean
    return mean.total / rows.count, mean


def read_metrics(metrics: Mapping[str, Any], rows: Rows, parts: bool) -> dict[str, Any]:
    """The user's (nested) metrics, each as a `Mean`.

    Raises:
        ValueError: a name is taken, a metric is not a number, or it is a scalar that
            is no mean of rows where parts of a batch are to be added.
    """
    taken = [name for name in ADDED if name in metrics]
    if taken:
        raise ValueError(
            f"the loss returns a metric {taken[0]!r}, and so does the step: leave it "
            "out, or rename it"
        )

    def read(path: tuple[Any, ...], value: Any) -> Mean:
        name, kind = join(path), _kind(value, rows)
        if kind is None:
            raise ValueError(
                f"metric {name!r} is {describe(value)}: return a scalar, one value a "
                f"row (shape [{rows.count}]), or Mean(total, count) of scalars"
            )
        if kind == "scalar" and parts and (rows.finer or not _is_float(value)):
            why = f"a scalar beside {rows.mask_path} of rank {rows.mask_rank}"
            if not _is_float(value):
                why = f"a whole number ({describe(value)}), as a count is"
            raise ValueError(
                f"metric {name!r} is {why}, and a scalar counts as the mean of its "
                "rows: return Mean(total, count), so that the parts of a batch add up "
                "right, or Mean(x, 1) for a number that is the same in all parts"
            )
        return _sums(value, kind, rows)

    read_all = jax.tree_util.tree_map_with_path
    return dict(read_all(read, dict(metrics), is_leaf=is_value))


def _kind(value: Any, rows: Rows) -> str | None:
    """Which of the three forms a value has, if any."""
    if isinstance(value, Mean):
        scalars = _shape(value.total) == () and _shape(value.count) == ()
        return "mean" if scalars else None
    return {(): "scalar", (rows.count,): "rows"}.get(_shape(value))


def _sums(value: Any, kind: str, rows: Rows) -> Mean:
    if kind == "rows":
        value = Mean.of(value, rows.mask)
    elif kind == "scalar":
        total = widen(value) * rows.weight
        if rows.mask is not None:  # the mean of no rows is 0/0
            total = jnp.where(rows.weight == 0, 0, total)
        value = Mean(total, rows.weight)
    total, count = widen(value.total), widen(jax.lax.stop_gradient(value.count))
    # One float type for all sums: integers would need an all-reduce of their own.
    dtype = jnp.result_type(total.dtype, count.dtype, jnp.float32)
    return Mean(total.astype(dtype), count.astype(dtype))


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a real number or an array of them; `None` for anything else."""
    if isinstance(value, (bool, int, float)):
        return ()
    if not tree.is_array(value):
        return None
    real = any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer, bool)
    )
    return tuple(value.shape) if real else None
