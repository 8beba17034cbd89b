"""What would make a step need less memory, and how much each choice saves."""

import dataclasses
from typing import Any

import jax

from lockstep.memory.plan import Plan
from lockstep.memory.usage import Usage
from lockstep.step import TrainStep
from lockstep.step.parameters import parameter_paths
from lockstep.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to need less memory.

    Attributes:
        name: what to write.
        saves: bytes on each device.
        how: "compiled", "computed", or "at most" for a bound.
        cost: what it costs.
    """

    name: str
    saves: int
    how: str
    cost: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the state: its bytes on one device, and without its copies.

    Attributes:
        path: as `state['w']`.
        nbytes: bytes on each device.
        saves: what splitting it over all devices of the rows would save on each.
        is_parameter: whether it is trained, and no moment or counter.
    """

    path: str
    nbytes: int
    saves: int
    is_parameter: bool


def state_leaves(plan: Plan, name: str = "state") -> list[Leaf]:
    """The leaves of the state, the largest savings first.

    A leaf can be split when it is whole on each device and one of its axes divides.
    """
    parameters = parameter_paths(plan.state, name)
    found = []
    for path, leaf in named_leaves(plan.state, name):
        nbytes = plan.device_bytes(leaf)
        saves = nbytes - nbytes // plan.devices if _can_split(leaf, plan) else 0
        found.append(Leaf(path, nbytes, saves, path in parameters))
    return sorted(found, key=lambda leaf: (-leaf.saves, -leaf.nbytes))


def find_choices(
    plan: Plan, usage: Usage, missed: int, *, compiling: bool = True
) -> list[Choice]:
    """The choices that save something, the largest saving first.

    Args:
        plan: the call.
        usage: its memory.
        missed: what `missed_donation` found.
        compiling: whether variants may be compiled; else their savings are bounds.
    """
    found = [*_donation(plan, missed), *_splitting(plan)]
    if not compiling:
        found += _bounds(plan, usage)
    elif plan.train_step:
        found += _variants(plan, plan.train_step, usage)
    else:
        found += _of_plain_step(plan, usage)
    return sorted((c for c in found if c.saves > 0), key=lambda c: -c.saves)


def state_bytes(plan: Plan) -> int:
    """Bytes of the state on each device."""
    return sum(map(plan.device_bytes, jax.tree.leaves(plan.state)))


def missed_donation(plan: Plan, usage: Usage, out: Any) -> int:
    """Bytes of a state that comes back in new memory; 0 for an evaluation step.

    Args:
        plan: the call.
        usage: its memory.
        out: what the step returns, as shapes; a state is the first of it.
    """
    state, new = jax.tree.leaves(plan.state), jax.tree.leaves(out)
    alike = len(new) >= len(state) and all(
        a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(state, new, strict=False)
    )
    return max(state_bytes(plan) - usage.reused, 0) if state and alike else 0


def _donation(plan: Plan, missed: int) -> list[Choice]:
    where = "at its default" if hasattr(plan.step, "place_batch") else "(0,)"
    text = f"donate the state: donate_argnums {where}"
    return [Choice(text, missed, "computed", "nothing; the old state is gone")]


def _splitting(plan: Plan) -> list[Choice]:
    """Sharding of the optimizer's state, and of everything: plain arithmetic."""
    leaves = state_leaves(plan)
    moments = sum(leaf.saves for leaf in leaves if not leaf.is_parameter)
    whole = sum(leaf.saves for leaf in leaves)
    return [
        Choice(
            "optimizer_sharding: split the optimizer's state over the devices",
            moments,
            "computed",
            "the gradient is scattered and the parameters are gathered: as many bytes",
        ),
        Choice(
            "fsdp: split parameters and optimizer's state over the devices",
            whole,
            "computed",
            "parameters are gathered in the forward and again in the backward pass",
        ),
    ]


def _variants(plan: Plan, step: TrainStep, usage: Usage) -> list[Choice]:
    """Other options of the same train step, each compiled."""
    found = []
    for factor in (2, 4):
        count = step.accumulate * factor
        other = dataclasses.replace(step, accumulate=count)
        if plan.rows % (plan.devices * other.parts_on_each(plan.devices)) == 0:
            saves = usage.peak - plan.with_train_step(other).usage().peak
            cost = f"{count} smaller passes, one after the other"
            found.append(Choice(f"accumulate={count}", saves, "compiled", cost))
    checkpointed = dataclasses.replace(step.loss, fn=jax.checkpoint(step.loss.fn))
    other = dataclasses.replace(step, loss=checkpointed)
    saves = usage.peak - plan.with_train_step(other).usage().peak
    found.append(Choice("remat=True", saves, "compiled", "about one more forward pass"))
    return found


def _of_plain_step(plan: Plan, usage: Usage) -> list[Choice]:
    """Half the rows, compiled; and what accumulation would add to that."""
    if plan.rows % (2 * plan.devices) or not plan.rows:
        return _bounds(plan, usage)[1:]
    half = plan.with_rows(plan.rows // 2).usage()
    saves = usage.temporaries - half.temporaries - gradient_bytes(plan)
    accumulate = Choice(
        "accumulate=2 in make_train_step, or half the rows a step",
        saves,
        "compiled",
        "2 smaller passes, one after the other",
    )
    return [accumulate, *_bounds(plan, usage)[1:]]


def _bounds(plan: Plan, usage: Usage) -> list[Choice]:
    """What accumulation and remat can save at most: the temporaries."""
    beyond = usage.temporaries - gradient_bytes(plan)
    return [
        Choice(
            "accumulate=2 in make_train_step, or half the rows a step",
            beyond // 2,
            "at most",
            "2 smaller passes, one after the other",
        ),
        Choice(
            "remat: jax.checkpoint around the loss",
            beyond,
            "at most",
            "about one more forward pass",
        ),
    ]


def gradient_bytes(plan: Plan) -> int:
    """Bytes of one gradient on each device: as many as the parameters have."""
    return sum(leaf.nbytes for leaf in state_leaves(plan) if leaf.is_parameter)


def _can_split(leaf: Any, plan: Plan) -> bool:
    where, shape = getattr(leaf, "sharding", None), getattr(leaf, "shape", ())
    if plan.rows_axis:  # stacked: every row is a whole copy
        where, shape = None, shape[1:]
    if plan.devices < 2 or (where is not None and not where.is_fully_replicated):
        return False
    return any(size and size % plan.devices == 0 for size in shape)
