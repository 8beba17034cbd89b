"""Training with the same bits on every device count: the batch in fixed shards.

The global batch is split into so many shards, whatever the number of devices. Each
shard has its rows, its key and its computation, and the sums are added in one order
(`fixed_order`): nothing is left that knows how many devices there are.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lockstep import tree
from lockstep.fixed_order import sealed, sum_devices, sum_parts
from lockstep.jaxprs.varying import named_axis_use
from lockstep.placement import count_rows
from lockstep.reduce import widen
from lockstep.step import model_state as statistics
from lockstep.step.accumulate import Objective, Sums, sum_gradients


def check_option(shards: Any, axis_name: str | None) -> None:
    """Refuse what cannot be a number of fixed shards.

    Raises:
        TypeError: no whole number.
        ValueError: no power of two, or the global view.
    """
    if shards is None:
        return
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise TypeError(f"fixed_shards={shards!r} is not a number of shards")
    if shards < 1 or shards & (shards - 1):
        raise ValueError(
            f"fixed_shards={shards} must be a power of two, as 8: the shards are added "
            "in pairs, and only so do all device counts share one order"
        )
    if axis_name is None:
        raise ValueError(
            f"fixed_shards={shards} is for the device view: in the global view the "
            "compiler splits the sums over the batch, differently for each number of "
            "devices. Give make_train_step axis_name='data'"
        )


def shards_on_each(shards: int, devices: int) -> int:
    """How many of the fixed shards each device computes.

    Raises:
        ValueError: the devices do not divide the shards.

    Example:
        >>> shards_on_each(8, 2)
        4
    """
    if shards % devices:
        counts = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
        raise ValueError(
            f"the step has fixed_shards={shards} and runs on {devices} devices: each "
            f"must compute as many shards as the others, so use {counts} devices"
        )
    return shards // devices


def sum_shards(
    objective: Objective,
    args: tuple[Any, Any, Any, Any],
    k: int,
    *,
    shards: int,
    axis_name: str,
    step: jax.Array,
    differs: list[bool],
) -> Sums:
    """What `sum_gradients` gives for each shard, summed over all of them.

    Args:
        objective: of one microbatch.
        args: parameters, model state, this device's rows and the step's key, which is
            equal on all devices; shard i draws with `fold_in(key, i)`.
        k: the number of microbatches of each shard.
        shards: how many there are on all devices together.
        axis_name: the mesh axis of the devices.
        step: the step's number, at least 0.
        differs: which leaves of the model state differ between shards; the new state
            holds their means.

    Raises:
        ValueError: rows that do not divide, a loss that looks at other shards, or
            parameters of 32 and of 64 bits.
    """
    params, model_state, batch, key = args
    widths = sorted({str(widen(p).dtype) for p in jax.tree.leaves(params)})
    if len(widths) > 1:  # seen on CPUs: AdamW's moments then differed in the last bit
        raise ValueError(
            f"fixed_shards promises bits for parameters of one width, and these are "
            f"trained in {' and '.join(widths)}: cast them to one of the two"
        )
    mine = shards_on_each(shards, lax.axis_size(axis_name))
    first = lax.axis_index(axis_name) * mine
    parts, join = _split(batch, mine)

    def compute(params: Any, model_state: Any, rows: list[Any], key: Any) -> Any:
        sums = sum_gradients(objective, params, model_state, join(rows), key, k)
        shares = statistics.shares(sums.model_state, differs, shards)
        return (sums.grads, sums.loss, sums.metrics, shares), sums.model_state

    shard = _own_computation(compute, _alive(step), axis_name)

    def part(i: jax.Array) -> Any:
        rows = [lax.dynamic_index_in_dim(x, i - first, keepdims=False) for x in parts]
        own_key = None if key is None else jax.random.fold_in(key, i)
        return shard(params, model_state, rows, own_key)

    def merge(left: Any, right: Any) -> Any:
        return jax.tree.map(jnp.add, left[0], right[0]), right[1]

    added, new_state = sum_parts(part, first, mine, merge)
    grads, loss, metrics, means = sum_devices(added, axis_name)
    new_state = statistics.with_means(new_state, differs, means)
    return Sums(grads, loss, metrics, new_state)


def seal_update(finish: Callable[[Any, Sums], Any], state: Any, sums: Sums) -> Any:
    """`finish(state, sums)`, the new state and the metrics, as its own computation.

    All it needs are arguments, so that they come in one order on every device count.
    """
    _, metrics = jax.eval_shape(finish, state, sums)

    def unmoved(state: Any, _: Sums) -> Any:
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

    return sealed(_alive(state.step), finish, unmoved, state, sums)


def check_statistics(model_state: Any, differs: list[bool], policy: Any) -> None:
    """Refuse statistics of single shards that were not asked for.

    Raises:
        ValueError: `policy` is not `"local"` and a leaf differs between shards.
    """
    named = zip(tree.named_leaves(model_state, "model_state"), differs, strict=True)
    paths = [path for (path, _), local in named if local]
    if paths and policy != "local":
        raise ValueError(
            f"{paths[0]} and {len(paths) - 1} more leaves of the model state come from "
            "the rows of one fixed shard only: say batch_norm='local' if each shard "
            "shall normalise by itself (the statistics are then averaged). Statistics "
            "of the whole batch and fixed_shards exclude each other"
        )


def _alive(step: jax.Array) -> jax.Array:
    """True; the compiler does not know that steps are counted from 0."""
    return step >= 0


def _split(batch: Any, count: int) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves with rows as `[count, B / count, ...]`, and how to make a batch again."""
    rows = count_rows(batch)
    if rows % count:
        raise ValueError(
            f"a device has {rows} rows and {count} of the fixed shards: the rows must "
            f"be a multiple of {count}; let lockstep.per_device place the batch, or "
            "use remainder='pad'"
        )
    leaves, structure = jax.tree.flatten(batch)
    at = [i for i, x in enumerate(leaves) if tree.is_array(x) and len(x.shape)]

    def join(parts: list[Any]) -> Any:
        whole = list(leaves)
        for i, part in zip(at, parts, strict=True):
            whole[i] = part
        return jax.tree.unflatten(structure, whole)

    shape = (count, rows // count)
    return [jnp.reshape(leaves[i], shape + leaves[i].shape[1:]) for i in at], join


def _own_computation(
    compute: Callable[..., Any], alive: jax.Array, axis_name: str
) -> Callable[..., Any]:
    """`compute`, traced once, checked, and sealed."""
    known: list[Any] = []

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if not known:
            jaxpr, out = jax.make_jaxpr(compute, return_shape=True)(*args)
            _refuse_axis(jaxpr, axis_name)
            known.extend((core.jaxpr_as_fun(jaxpr), jax.tree.structure(out), jaxpr))
        fn, out_structure, jaxpr = known

        def zeros(*_: Any) -> list[jax.Array]:
            avals = map(operator.attrgetter("aval"), jaxpr.jaxpr.outvars)
            return [lax.full_like(aval, 0) for aval in avals]

        return jax.tree.unflatten(out_structure, sealed(alive, fn, zeros, *leaves))

    return run


def _refuse_axis(jaxpr: Any, axis_name: str) -> None:
    used = named_axis_use(jaxpr, axis_name)
    if used:
        raise ValueError(
            f"the loss looks beyond its own rows ({used} over {axis_name!r}), as "
            "BatchNorm with axis_name or gathered negatives do, and with fixed_shards "
            "a loss sees one shard: what the devices hold together depends on their "
            "number. Leave the axis out of the loss, or leave out fixed_shards"
        )
