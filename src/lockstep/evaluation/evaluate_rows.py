"""`evaluate` and `predict`: every row of a data set exactly once, on all devices."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lockstep import tree
from lockstep.evaluation.results import Result, as_eval_step, results
from lockstep.metrics import Mean, compute, is_mean, merge, to_means
from lockstep.notices import say_once
from lockstep.placement import map_named


def evaluate(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    *,
    mesh: Mesh | None = None,
    remainder: str | None = None,
) -> dict[str, float]:
    """The metrics of a whole data set, averaged once over all its rows.

    A `Mean` is merged over the batches; a scalar counts as the mean of the rows of its
    batch, and is weighted by them; an array `[B]` holds one value a row. Padded rows
    are left out. The state is never donated.

    Args:
        step: `(state, batch) -> dict of metrics`: an unchanged single-device function,
            or what `parallelize` or `per_device` made of it.
        state: any pytree; placed once if it comes from the host.
        batches: an iterable of host batches, or a `prefetch(...)` of them.
        mesh: the devices, for a plain function; by default those of the state, or all.
        remainder: for a plain function, what to do with rows that do not divide:
            `"unsplit"` by default (each short size compiles once more), or `"pad"`.

    Returns:
        One float a metric; nested names are joined with `/`.

    Raises:
        ValueError: there is no batch, a metric is not one number or one value a row,
            a scalar in the device view was made from shards of unequal rows, or a
            scalar of several batches is a whole number, as a count is.
        TypeError: the step returns no dict, such as a train step.

    Example:
        >>> def eval_step(w, batch):
        ...     return {"error": abs(batch["x"] - w)}
        >>> evaluate(eval_step, 1.0, [{"x": np.arange(8.0)}, {"x": np.arange(2.0)}])
        {'error': 2.3}
    """
    step = as_eval_step(step, state, mesh, remainder)
    dropped = step.dropped_rows
    total = None
    for result in results(step, state, batches):
        means = _to_means(result, more=total is not None)
        total = means if total is None else merge(total, means)
    if total is None:
        raise ValueError(_EMPTY.format("evaluate"))
    if step.dropped_rows > dropped:
        say_once(
            f"evaluate drops {id(step)}",
            f"evaluate left out {step.dropped_rows - dropped} rows, for the step has "
            "remainder='drop': 'unsplit' or 'pad' count every row",
        )
    return compute(total)


def predict(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    *,
    mesh: Mesh | None = None,
    remainder: str | None = None,
) -> Any:
    """The outputs for exactly the rows of the batches, in their order, as NumPy.

    Args:
        step: `(state, batch) -> tree of [B, ...] arrays`; otherwise as in `evaluate`.
        state: any pytree; placed once if it comes from the host.
        batches: an iterable of host batches, or a `prefetch(...)` of them.
        mesh: as in `evaluate`.
        remainder: as in `evaluate`, but not `"drop"`.

    Returns:
        A tree of `[rows, ...]` arrays, whole on every process.

    Raises:
        ValueError: there is no batch, an output has no rows, or rows would be dropped.

    Example:
        >>> batches = [np.arange(8.0), np.arange(3.0)]
        >>> predict(lambda w, x: {"y": w * x}, 2.0, batches)["y"].tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 0.0, 2.0, 4.0]
    """
    step = as_eval_step(step, state, mesh, remainder)
    if step.remainder == "drop":
        raise ValueError(
            "predict returns one output for each input row, and remainder='drop' "
            "leaves rows out: use 'unsplit' or 'pad'"
        )
    parts = [
        map_named(functools.partial(_rows_of, result), result.output, "output")
        for result in results(step, state, batches)
    ]
    if not parts:
        raise ValueError(_EMPTY.format("predict"))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


_EMPTY = (
    "{} got no batch: the iterable is empty, or an iterator that was read before; give "
    "a list, a loader or data.batches(...)"
)


def _to_means(result: Result, *, more: bool) -> dict[str, Any]:
    """The metrics of one batch as host sums over its real rows.

    `more` says that there were batches before it, to which they are added.
    """
    if not isinstance(result.output, Mapping):
        raise TypeError(
            f"evaluate needs a step (state, batch) -> dict of metrics, and this one "
            f"returned a {type(result.output).__name__}; a train step returns its new "
            "state too: write an eval step of the loss and metrics alone"
        )

    def convert(path: Any, value: Any) -> Any:
        if is_mean(value) or not tree.is_array(value):
            return value
        if value.shape == ():
            _check_scalar(result, jax.tree_util.keystr(path))
            if more:
                _check_no_count(value, jax.tree_util.keystr(path))
            return value
        values = result.real_rows(value)
        if values is None or values.ndim != 1:
            return value  # to_means says what is wrong with it
        exact = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
        return Mean(values.sum(dtype=np.int64 if exact else np.float64), len(values))

    means = jax.tree_util.tree_map_with_path(convert, result.output, is_leaf=is_mean)
    return to_means(means, rows=result.real)


def _check_scalar(result: Result, path: str) -> None:
    if result.shards and result.real < result.rows:
        raise ValueError(
            f"metric {path} is a scalar, and {result.real} real rows of {result.rows} "
            f"lie unequally on {result.shards} devices: the mean over devices would "
            "weigh them wrongly. Return Mean.of(values, batch['mask']) or one value a "
            "row, or use parallelize"
        )


def _check_no_count(value: Any, path: str) -> None:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise ValueError(
            f"metric {path} is a whole number ({value.dtype}), as a count is, and a "
            "scalar counts as the mean of its rows: the mean over batches is not the "
            "count of all rows. Return one value a row or Mean(total, count), or "
            "Mean(x, 1) for a number that is the same in every batch"
        )


def _rows_of(result: Result, path: str, leaf: Any) -> np.ndarray:
    """The real rows of one output of `predict`."""
    rows = result.real_rows(leaf)
    if rows is None:
        raise ValueError(
            f"predict returns rows, and {path} is {tree.describe_leaf(leaf)} for a "
            f"batch of {result.rows} rows: return [B, ...] arrays (evaluate averages "
            "scalars)"
        )
    return rows
