"""Why a step differs between one device and N: one small function a cause.

Each looks at the evidence and answers in the words of its fix, or not at all.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from lockstep.debug.comparing import dataflow
from lockstep.debug.comparing.balance import Uneven, equal_shards, uneven_weights
from lockstep.debug.comparing.factors import factor_of
from lockstep.debug.comparing.trials import Body, Call
from lockstep.debug.comparing.verdicts import Leaf
from lockstep.jaxprs.source_lines import source_line
from lockstep.jaxprs.varying import equations, is_collective
from lockstep.parallel.parallel_step import ParallelStep

# A running variance: `var`, `var_ema`, `running_var`, and not `variables`.
_VARIANCE = re.compile(r"(?<![a-z])var(iance)?(?![a-z])", re.IGNORECASE)
_STATISTIC = re.compile(r"(?<![a-z])(mean|var(iance)?|ema|stats)(?![a-z])", re.I)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of a step that differs.

    Attributes:
        step: the step.
        call: its arguments, on the host.
        counts: the two numbers of devices.
        leaves: all outputs.
        bodies: what one device runs, for both counts; `None` in the global view.
        agrees: runs the step on both counts with other arguments: do they agree then?
        dependent_rows: how the rows of one device meet in the loss of a train step.
    """

    step: ParallelStep
    call: Call
    counts: tuple[int, int]
    leaves: list[Leaf]
    bodies: tuple[Body, Body] | None
    agrees: Callable[[Call], bool]
    dependent_rows: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[Leaf]:
        """The leaves that differ, without those that differ even among the devices."""
        wrong = [leaf for leaf in self.leaves if leaf.verdict == "wrong"]
        return [leaf for leaf in wrong if not leaf.copies_differ]


def find_causes(evidence: Evidence) -> list[str]:
    """All causes that can be seen."""
    if evidence.dependent_rows:  # a train step reduces as it should: this is all
        way_out = (
            "Each device has its own rows only: gather the others in the loss "
            "(lax.all_gather), return Mean(total, count), or use the global view"
        )
        uneven = mean_of_means(evidence)
        met = [f"{text}. {way_out}" for text in evidence.dependent_rows]
        return [uneven] if uneven else met
    found = [cause(evidence) for cause in _CAUSES]
    return [text for text in found if text]


def not_averaged(evidence: Evidence) -> str | None:
    """State leaves whose copies differ between the devices."""
    state = [leaf for leaf in evidence.leaves if leaf.old is not None]
    odd = [i for i, leaf in enumerate(state) if leaf.copies_differ]
    if not odd or evidence.bodies is None:
        return None
    paths, body = [state[i].path for i in odd], evidence.bodies[1]
    names = _first(paths)
    moved = [leaf for leaf in state if leaf.is_float and leaf.moved > 0]
    most_are_averaged = 2 * len(odd) < len(moved)
    if most_are_averaged or all(_STATISTIC.search(path) for path in paths):
        return (
            f"not averaged: {names} of the new state come from each device's own rows. "
            f"Average them before the step returns them (lax.pmean(..., {body.axis!r}))"
            f", or give a BatchNorm layer axis_name={body.axis!r}"
        )
    inside = ""
    if dataflow.depends_on_other_devices(body, odd[0]):
        inside = (
            "lax.pmean inside the loss averages the loss, not its gradient, which is "
            "still that of each device's own rows. "
        )
    return (
        f"gradient not averaged: {names} differ between the devices after one step. "
        f"{inside}Average after jax.grad and before the update: "
        f"grads = lax.pmean(grads, {body.axis!r})"
    )


def gradient_factor(evidence: Evidence) -> str | None:
    """N times the gradient, or an Nth of it, in updates or in optimizer moments."""
    ratio = evidence.counts[1] / evidence.counts[0]
    in_state = [leaf for leaf in evidence.wrong if leaf.old is not None]
    if hits := _multiplied(evidence, in_state, ratio):
        fix = "lax.pmean(grads) where the step has lax.psum(grads)"
        return f"gradient {ratio:.2f} x: summed, not averaged ({hits}): {fix}"
    if hits := _multiplied(evidence, in_state, 1 / ratio):
        fix = "divide by the number of devices once"
        return f"gradient {1 / ratio:.2f} x: averaged twice ({hits}): {fix}"
    return None


def output_factor(evidence: Evidence) -> str | None:
    """A metric that is N times too large, or an Nth."""
    ratio = evidence.counts[1] / evidence.counts[0]
    others = [leaf for leaf in evidence.wrong if leaf.old is None]
    if hits := _multiplied(evidence, others, ratio):
        return f"{hits}: summed, not averaged: lax.pmean where the step has lax.psum"
    if hits := _multiplied(evidence, others, 1 / ratio):
        return (
            f"{hits}: a sum over the rows of one device is returned as the mean over "
            "devices: lax.psum, or return Mean(total, count)"
        )
    return None


def greatest_not_mean(evidence: Evidence) -> str | None:
    """A `pmax` or `pmin` where the gradients should be averaged."""
    if evidence.bodies is None or not any(x.old is not None for x in evidence.wrong):
        return None
    body = evidence.bodies[1]
    for eqn in equations(body.jaxpr):
        name = eqn.primitive.name
        large = any(var.aval.size > 1 for var in eqn.outvars)
        if name in ("pmax", "pmin") and large and is_collective(eqn, body.axis):
            line = source_line(eqn)
            where = f" at {line}" if line else ""
            return (
                f"not averaged: lax.{name}{where} takes one device's value in each "
                f"place: grads = lax.pmean(grads, {body.axis!r})"
            )
    return None


def same_draws(evidence: Evidence) -> str | None:
    """Random numbers for the rows that are the same on all devices."""
    if evidence.bodies is None:
        return None
    draws = dataflow.row_draws(*evidence.bodies)
    same = [shape for shape, differs in draws if not differs]
    if not same:
        return None
    axis = evidence.bodies[1].axis
    return (
        f"same mask on every device: {len(same)} of the step's random draws, first "
        f"{list(same[0])}, use a key that is equal on all devices, so row i of each "
        "shard gets the same numbers. Give the key as a further argument of the step "
        "(it is folded with the device's number), fold it yourself, "
        f"lockstep.device_key(key, {axis!r}), or use parallelize"
    )


def clipped_early(evidence: Evidence) -> str | None:
    """Clipping of each device's own gradient, which is not that of the average."""
    if evidence.bodies is None:
        return None
    body = evidence.bodies[1]
    if not dataflow.clips_before_averaging(body):
        return None
    return (
        "clipped before averaging: each device limits the gradient of its own rows, "
        "and the mean of clipped gradients is not the clipped mean. First grads = "
        f"lax.pmean(grads, {body.axis!r}), then clip (the optimizer's "
        "clip_by_global_norm, or clip_norm= of make_train_step)"
    )


def batch_norm_scope(evidence: Evidence) -> str | None:
    """Running variances below those of the whole batch."""
    if evidence.bodies is None:
        return None
    for leaf in evidence.wrong:
        if leaf.old is None or not _VARIANCE.search(leaf.path):
            continue
        lower = leaf.got < leaf.want * (1 - 1e-5)
        if (leaf.got >= 0).all() and (lower | np.isclose(leaf.got, leaf.want)).all():
            i = np.unravel_index(np.argmax(leaf.want - leaf.got), leaf.want.shape)
            axis = evidence.bodies[1].axis
            return (
                "BatchNorm scope: each device normalises with the statistics of its "
                f"own rows ({leaf.path} is {leaf.got[i]:.4g} and over the whole batch "
                f"{leaf.want[i]:.4g}: a mean of local variances leaves out how the "
                "shards' means differ). Give the layer the axis of the mesh "
                f"(axis_name={axis!r}), use parallelize, or stay with local statistics "
                "on purpose"
            )
    return None


def mean_of_means(evidence: Evidence) -> str | None:
    """Uneven weights on the shards; with even ones the devices agree."""
    if evidence.bodies is None:
        return None
    for uneven in uneven_weights(evidence.step, evidence.call, evidence.counts[1]):
        if evidence.agrees(uneven.evened):
            return (
                f"mean of means: {_shards(uneven)}, each device (or microbatch) "
                "divides by its own, and with even shards the difference is gone. "
                "Divide once: the sum over all devices by the count over all devices, "
                "lax.psum(total) / lax.psum(count); or return Mean.of(values, mask) "
                "from the loss of make_train_step; or use parallelize"
            )
    return None


def advice(evidence: Evidence) -> str:
    """Where no cause was found: what is known, and what would show more."""
    data = evidence.step, evidence.call, evidence.counts[1]
    hints = [_shards(x) for x in uneven_weights(*data) if x.is_mask]
    if evidence.bodies and evidence.agrees(equal_shards(*data)):
        hints.append(
            "with the same rows on every device the difference is gone, so something "
            "is computed from each device's own rows: a mean over its own count, "
            "statistics of a batch, or rows that meet (in-batch negatives)"
        )
    if any(leaf.redraw for leaf in evidence.leaves):
        hints.append(
            "the random masks depend on the number of devices, and without them more "
            "would be seen"
        )
    known = f" What is known: {'; '.join(hints)}." if hints else ""
    return (
        f"the cause is not visible in the outputs.{known} Show the loss: return it and "
        "its gradient as metrics of the step, or compare make_train_step(loss, "
        "optimizer), and compare again"
    )


_CAUSES: tuple[Callable[[Evidence], str | None], ...] = (
    not_averaged,
    gradient_factor,
    output_factor,
    greatest_not_mean,
    same_draws,
    clipped_early,
    batch_norm_scope,
    mean_of_means,
)


def _multiplied(evidence: Evidence, leaves: list[Leaf], scale: float) -> str | None:
    """The leaves that changed by the scale or, as second moments, by its square."""
    slack = 0.25 if any(leaf.redraw for leaf in evidence.leaves) else 0.01
    hits = [
        f"{leaf.path} {factor:.3g} x"
        for leaf in leaves
        if (factor := factor_of(leaf))
        and min(abs(factor / s - 1) for s in (scale, scale**2)) < slack
    ]
    return _first(hits) if hits else None


def _shards(uneven: Uneven) -> str:
    numbers = [f"{n:g}" for n in uneven.weights[:8]]
    numbers[-1] = f"and {numbers[-1]}" if len(uneven.weights) <= 8 else "..."
    listed = ", ".join(numbers[:-1]) + " " + numbers[-1]
    return f"the shards have {listed} valid {uneven.unit}"


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
    return ", ".join(texts[:2]) + more
