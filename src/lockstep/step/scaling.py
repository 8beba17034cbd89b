"""Loss scaling: keeps gradients in float16 away from zero and from infinity.

The loss is multiplied by the scale before differentiation and the gradients are
divided by it after the reduction. A scale that grows finds its own limit: when a
gradient overflows, the step is skipped on all devices and the scale is halved
(Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

_LEAST, _GREATEST = 1.0, 2.0**24


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """How a loss scale moves; `loss_scale="dynamic"` means these numbers.

    Attributes:
        initial: the first scale.
        growth_interval: after how many finite steps in a row the scale grows.
        factor: by how much it grows, and shrinks when a gradient is not finite; it
            stays between 1 and 2**24.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        fits = _LEAST <= self.initial <= _GREATEST
        if not (fits and self.growth_interval >= 1 and self.factor > 1):
            raise ValueError(
                f"{self} is no moving scale: initial is between 1 and 2**24, "
                "growth_interval 1 or more, factor above 1"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The loss scale of a run.

    Attributes:
        value: float32, the scale of the next step.
        good_steps: int32, finite steps since the scale last moved.
        skipped: int32, how many steps were skipped so far.
    """

    value: jax.Array
    good_steps: jax.Array
    skipped: jax.Array


def read_loss_scale(loss_scale: Any) -> DynamicScale | float | None:
    """The option `loss_scale`, checked.

    Raises:
        TypeError: neither `None`, `"dynamic"`, a number nor a `DynamicScale`.
        ValueError: a number that is not above 0.
    """
    if loss_scale is None or isinstance(loss_scale, DynamicScale):
        return loss_scale
    if loss_scale == "dynamic":
        return DynamicScale()
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
        raise TypeError(
            f"loss_scale={loss_scale!r}: give 'dynamic', a number, a DynamicScale, or "
            "None for no scaling (bfloat16 and float32 need none)"
        )
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale={loss_scale!r} must be above 0 and finite")
    return float(loss_scale)


def start(scale: DynamicScale) -> ScaleState:
    """The state before the first step."""
    return ScaleState(
        value=jnp.asarray(scale.initial, jnp.float32),
        good_steps=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
    )


def move(scale: DynamicScale, state: ScaleState, finite: jax.Array) -> ScaleState:
    """The state after a step whose gradients were finite or not.

    Example:
        >>> state = start(DynamicScale(initial=8.0))
        >>> float(move(DynamicScale(), state, jnp.array(False)).value)
        4.0
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= scale.growth_interval
    up = jnp.where(grow, state.value * scale.factor, state.value)
    value = jnp.where(finite, up, state.value / scale.factor)
    return ScaleState(
        value=jnp.clip(value, _LEAST, _GREATEST),
        good_steps=jnp.where(grow, 0, good),
        skipped=state.skipped + jnp.where(finite, 0, 1),
    )
