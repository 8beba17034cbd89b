"""Is a loss computed in parts what it is as a whole? Asked before the first step.

First its jaxpr is read, which costs nothing and proves most losses, or the contrary.
What is left is tried: the loss of some rows in one part and in two. So a loss whose
rows meet (in-batch negatives, a maximum or a norm over rows, a sum, a mean over the
tokens of one part) is refused before it trains on something else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lockstep import placement
from lockstep.distributed import session
from lockstep.jaxprs.source_lines import source_line
from lockstep.metrics import Mean, flatten
from lockstep.parallel.independence.flow import Follow
from lockstep.parallel.independence.kinds import (
    Average,
    Free,
    Kind,
    Met,
    RaisedCount,
    Rows,
    Sum,
    Uneven,
)
from lockstep.parallel.independence.parts import Parts
from lockstep.parallel.independence.trial import Trial
from lockstep.parallel.options import Options
from lockstep.parallel.static_leaves import unwrap, wrap
from lockstep.placement import MaskedBatch
from lockstep.step.rows import open_batch

_WHY_UNEVEN = {
    "div": ": a sum divided by a sum, and {parts} whose divisors differ would weigh "
    "alike (a mean of means)",
    "mul": ": a product of means, and the means of each {part} are others",
}
_WHY_BENT = ": it bends a mean over the rows, and the means of each {part} are others"


class RowsCheck:
    """The check for one step; `done` after its first call."""

    def __init__(self, options: Options) -> None:
        """Nothing is traced yet."""
        self._options = options
        self._parts = Parts.of(options)
        self.done = (
            self._parts.count == 1
            or options.batch_argnums != (1,)
            or "local" in (options.fn.rows, options.fn.batch_norm)
        )

    def __call__(self, placed: tuple[Any, ...]) -> None:
        """Look at the loss of placed arguments.

        Raises:
            ValueError: the rows of one part meet in the loss or in a metric.
        """
        for finding in self.findings(placed):
            way_out = self._parts.way_out(self._options.fn.accumulate)
            raise ValueError(f"{finding}. {way_out}")
        self.done = True

    def findings(self, placed: tuple[Any, ...]) -> list[str]:
        """What is other in two parts than in one: the loss or a metric, and why."""
        unproven, parts = self.unproven(placed), self._parts
        sure = [
            _describe(name, kind, parts)
            for name, kind in unproven.items()
            if isinstance(kind, (Uneven, RaisedCount))  # no rows need to show it
        ]
        if sure or not unproven:
            return sure
        gaps = self._gaps_anywhere(placed)
        return [
            f"{_describe(name, kind, parts)}: the same rows give "
            f"{gaps[name][0]:.6g} {parts.preposition} one {parts.name}, and "
            f"{gaps[name][1]:.6g} {parts.preposition} two with half of them each"
            for name, kind in unproven.items()
            if name in gaps
        ]

    def _gaps_anywhere(self, placed: tuple[Any, ...]) -> dict[str, Any]:
        """What the trial finds in any process: each has rows of its own."""
        arguments = _arguments(self._options, placed)
        own = Trial(self._options, self._parts, *arguments).gaps()
        group = session.group_of(self._options.mesh)
        found = session.exchange(own, group, what="the trial of the loss") or [own]
        return {name: gap for gaps in found for name, gap in gaps.items()}

    def unproven(self, placed: tuple[Any, ...]) -> dict[str, Kind]:
        """The loss and metrics that may be other than one device gives, by name."""
        state, batch, key = _arguments(self._options, placed)
        fn, mesh = self._options.fn, self._options.device_mesh
        axis = self._options.device_axis or self._options.row_axis
        rows = placement.count_rows(batch) // self._parts.count
        rows = max(rows, 2)  # one row alone meets nobody
        few = _with_rows(batch, rows)
        opened = jax.eval_shape(lambda b: open_batch(b, fn.mask).data, few)
        names: list[str] = []

        def values(params: Any, model_state: Any, data: Any, key: Any) -> Any:
            args = unwrap((params, model_state, data, key))
            value, metrics, _ = fn.loss(*args)
            found = {"loss": value, **flatten(metrics)}
            names[:] = found
            return list(found.values())

        args = state.params, state.model_state, opened, key
        environment = list(mesh.shape.items()) if self._options.device_axis else []
        traced, shapes = jax.make_jaxpr(
            values, axis_env=environment, return_shape=True
        )(*args)
        masked = isinstance(batch, MaskedBatch) or _own_mask(opened, fn.mask)
        least = 1.0 if _has_whole_mask(batch, fn.mask) else 0.0
        follow = Follow(rows, axis, mesh.shape[axis], least)
        kinds = follow(traced.jaxpr, _inputs(args, fn.mask))
        outputs = jax.tree.unflatten(jax.tree.structure(shapes), kinds)
        odd = [_odd(value, masked, rows) for value in outputs]
        return {name: kind for name, kind in zip(names, odd, strict=True) if kind}


def _describe(name: str, kind: Kind, parts: Parts) -> str:
    what = "the loss" if name == "loss" else f"metric {name!r}"
    if isinstance(kind, RaisedCount):
        return (
            f"{what} has a count that is raised in every part of the batch, as by "
            "jnp.maximum(count, 1): parts in which nothing counts would then weigh. "
            "Give Mean the plain sum, which may be 0"
        )
    if isinstance(kind, Sum):
        return f"{what} is a sum over its rows, and a scalar counts as their mean"
    if isinstance(kind, Average):
        return f"{what} is a mean that leaves the mask out"
    where = ""
    if isinstance(kind, (Met, Uneven)):
        line = source_line(kind.eqn) or source_line(kind.caller or kind.eqn)
        where = f" (rows meet in `{kind.eqn.primitive.name}`"
        where += f" at {line})" if line else ")"
    if isinstance(kind, Uneven):
        why = _WHY_UNEVEN.get(kind.eqn.primitive.name, _WHY_BENT)
        where += why.format(part=parts.name, parts=parts.several)
    return f"{what} is no mean of independent rows{where}"


def _arguments(options: Options, placed: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """The state, the batch and the key of the loss."""
    state, batch, *rest = wrap(placed)
    key = rest[0] if len(rest) > 1 else rest[-1].get("key", state.key)
    return state, batch, key if options.fn.takes_key else None


def _with_rows(batch: Any, rows: int) -> Any:
    """Descriptions of the leaves for another number of rows."""

    def describe(x: Any) -> Any:
        shape = (rows, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(describe, batch)


def _own_mask(data: Any, name: str | None) -> bool:
    return isinstance(data, dict) and name in data and len(data[name].shape) == 1


def _has_whole_mask(batch: Any, name: str | None) -> bool:
    """Whether the user's own mask holds whole numbers; weights may be fractions."""
    data = batch.data if isinstance(batch, MaskedBatch) else batch
    mask = data[name] if isinstance(data, dict) and name in data else None
    if mask is None or not jnp.issubdtype(mask.dtype, jnp.floating):
        return True
    return bool(jnp.all(mask == jnp.round(mask)))


def _inputs(args: tuple[Any, ...], mask_name: str | None) -> list[Kind]:
    """The kinds of the inputs: the leaves of the batch have rows, no others do."""
    params, model_state, data, key = args
    masks = {id(data[mask_name])} if _own_mask(data, mask_name) else set()

    def free(x: Any) -> Kind:
        return Free(frozenset(range(len(x.shape))))

    def rows(x: Any) -> Kind:
        return Rows(0, mask=id(x) in masks) if x.shape else Free()

    before = [free(x) for x in jax.tree.leaves((params, model_state))]
    after = [free(x) for x in jax.tree.leaves(key)]
    return before + [rows(x) for x in jax.tree.leaves(data)] + after


def _odd(value: Any, masked: bool, rows: int) -> Kind | None:
    """What speaks against a value of the loss; `None` if it is the same in parts."""
    if isinstance(value, Mean):
        return _odd_mean(value.total, value.count, rows)
    if isinstance(value, (Rows, Free)) or value == Average(masked=masked):
        return None
    return value


def _odd_mean(total: Kind, count: Kind, rows: int) -> Kind | None:
    number = count.number if isinstance(count, Free) else None
    if isinstance(total, Sum) and isinstance(count, Sum) and not total.raised:
        return RaisedCount() if count.raised else None
    if isinstance(total, Sum) and number and number % rows == 0:
        return None
    equal = isinstance(total, Free) or total == Average()
    if equal and isinstance(count, Free):
        return None
    return count if isinstance(count, Met) else total
