"""Gradients of a batch's total loss, in one go or one microbatch after the other.

What adds up over microbatches is totals and counts, never means: microbatches with
unequal numbers of rows or tokens then give what the whole batch gives.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.metrics import Mean
from lockstep.reduce import widen
from lockstep.step.outcome import Outcome
from lockstep.step.rows import split_microbatches

# (params, model_state, batch, key) -> what is differentiated, and the sums
Objective = Callable[[Any, Any, Any, Any], tuple[jax.Array, Outcome]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What one device knows of a step after all its microbatches.

    Attributes:
        grads: the sum of the objectives' gradients, in float32 or wider.
        loss: the loss as a `Mean`.
        metrics: the user's metrics, each a `Mean`.
        model_state: after the last microbatch; `None` without one.
    """

    grads: Any
    loss: Mean
    metrics: dict[str, Any]
    model_state: Any


def sum_gradients(
    objective: Objective,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array | None,
    k: int,
) -> Sums:
    """Differentiate a batch in k microbatches and add everything up.

    The memory for activations is that of one microbatch. With k > 1 microbatch j draws
    with `fold_in(key, j)`, and the model state is handed from one to the next.

    Args:
        objective: of one microbatch; its gradients are added, not averaged.
        params: what to differentiate by.
        model_state: the state before the first microbatch; `None` without one.
        batch: a tree of `[B, ...]` arrays, B a multiple of k.
        key: one key, or `None`.
        k: the number of microbatches.

    Raises:
        ValueError: B is no multiple of k.
    """

    def microbatch(model_state: Any, part: Any, key: Any) -> Sums:
        grads, outcome = jax.grad(objective, has_aux=True)(
            params, model_state, part, key
        )
        grads = jax.tree.map(widen, grads)
        if outcome.empty is not None:  # 0/0: neither a loss nor a gradient
            grads = jax.tree.map(lambda g: jnp.where(outcome.empty, 0, g), grads)
        return Sums(grads, outcome.loss, outcome.metrics, outcome.model_state)

    if k == 1:
        return microbatch(model_state, batch, key)
    leaves, join = split_microbatches(batch, k)

    def body(carry: Any, part: Any) -> Any:
        total, model_state = carry
        j, leaves = part
        part_key = None if key is None else jax.random.fold_in(key, j)
        sums = microbatch(model_state, join(leaves), part_key)
        total = jax.tree.map(jnp.add, total, sums.grads)
        return (total, sums.model_state), (sums.loss, sums.metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(widen(p)), params)
    (grads, model_state), means = jax.lax.scan(
        body, (zeros, model_state), (jnp.arange(k), leaves)
    )
    loss, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), means)
    return Sums(grads, loss, metrics, model_state)
