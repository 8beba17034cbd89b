"""`compare`: does a step on N devices give what it gives on one?"""

import dataclasses
from typing import Any

import numpy as np

from lockstep import placement
from lockstep.debug.comparing import dataflow, noise
from lockstep.debug.comparing.causes import Evidence, advice, find_causes
from lockstep.debug.comparing.comparison import Comparison, Row
from lockstep.debug.comparing.factors import factor_of
from lockstep.debug.comparing.trials import (
    Body,
    Call,
    Trial,
    map_batches,
    parts_on_each,
    read_call,
)
from lockstep.debug.comparing.verdicts import NOISE_FACTOR, Leaf, align, with_moments
from lockstep.parallel import as_parallel, per_device
from lockstep.parallel.parallel_step import ParallelStep

# With the cause taken away, this much of a difference may remain as rounding.
_REST = 1e-2


def compare(
    step: Any,
    *args: Any,
    devices: tuple[int, int] = (1, 4),
    axis_name: str | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Run one step on one device and on N, and say what differs and why.

    Every output is judged: *equal* to the bit; *rounding*, no further apart than a
    change of the inputs in their last place explains; *no signal*, when rounding alone
    moves it as far as the step does; or *wrong*. The causes of wrong outputs are named
    where they can be seen. Nothing of the caller's is donated or changed.

    Args:
        step: a plain step, a `TrainStep`, or what `parallelize` or `per_device`
            returned. In the device view the reference is the same step on a mesh of
            one device.
        *args: its arguments: the state, the whole batch, keys and so on.
        devices: the two numbers of devices.
        axis_name: for a plain step that averages by itself: the name that its
            collectives use.
        tolerance: the accepted difference relative to the update of a leaf (to the
            value of an output that is no state), in 2-norm. By default 1e-6 in
            float32, 1e-12 in float64, 2**-6 in bfloat16, and what moving the inputs by
            their last place makes.

    Returns:
        A `Comparison`: `.same`, `.rows`, `.causes`; `str` and notebooks show a table.

    Raises:
        ValueError: too few devices, rows that do not divide, or a step that
            `parallelize` or `per_device` refuses.
        RuntimeError: an argument was donated to an earlier call.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> def step(w, x):
        ...     grad = jax.grad(lambda w: (w * x).mean())(w)
        ...     return w - 0.1 * jax.lax.psum(grad, "data"), None
        >>> x = np.arange(4, dtype=np.float32)
        >>> print(compare(step, jnp.float32(1), x, axis_name="data"))
        output  verdict  difference
        state   wrong    5.3e-01     4.00 x = number of devices: summed, not averaged
        WRONG: 1 of 1 outputs differ between 1 and 4 devices
        likely cause: gradient 4.00 x: summed, not averaged (state 4 x):
          lax.pmean(grads) where the step has lax.psum(grads)
    """
    if axis_name is not None:
        step = per_device(step, axis_name=axis_name)
    return compare_call(as_parallel(step), args, {}, devices, tolerance)


def compare_call(
    step: ParallelStep,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    devices: tuple[int, int],
    tolerance: float | None = None,
) -> Comparison:
    """`compare` for one call of a wrapped step, keyword arguments included."""
    few, many = devices
    if not 1 <= few < many:
        raise ValueError(
            f"devices={devices!r}: give two numbers, the smaller first, as (1, 4)"
        )
    pair = Trial(step, few), Trial(step, many)
    call, notes = _whole_rows(step, read_call(step, args, keywords), many)
    bodies = _bodies(pair, call)
    leaves = _judge(pair, call, bodies, tolerance)
    rows = tuple(_row(leaf, many / few) for leaf in leaves)
    report = Comparison(devices, rows, notes=tuple(notes))
    if report.same:
        return report

    def agrees(other: Call) -> bool:
        return _agrees(pair, other, leaves)

    met = tuple(pair[1].dependent_rows(call))
    evidence = Evidence(step, call, devices, leaves, bodies, agrees, met)
    causes = tuple(find_causes(evidence))
    told = "" if causes else advice(evidence)
    return dataclasses.replace(report, causes=causes, advice=told)


def _judge(
    pair: tuple[Trial, Trial],
    call: Call,
    bodies: tuple[Body, Body] | None,
    tolerance: float | None,
) -> list[Leaf]:
    """Every output on both counts, with what rounding and other keys make of it."""
    leaves = _run(pair, call)
    if all(leaf.verdict == "equal" for leaf in leaves):
        return leaves
    few, known = pair[0], {leaf.path: leaf.want for leaf in leaves}
    moved = noise.movement(few, call, known, noise.nudged(few, call))
    redraws: dict[str, float] = {}
    if bodies and any(differs for _, differs in dataflow.row_draws(*bodies)):
        redraws = noise.movement(few, call, known, noise.redrawn(few, call))
    return with_moments(
        [
            dataclasses.replace(
                leaf,
                noise=moved[leaf.path],
                redraw=redraws.get(leaf.path, 0.0),
                tolerance=tolerance,
            )
            for leaf in leaves
        ]
    )


def _run(pair: tuple[Trial, Trial], call: Call) -> list[Leaf]:
    """Run both and pair up their outputs."""
    few, many = pair
    old = noise.old_values(few, call)
    counts = few.count, many.count
    on_many = many(call)  # first, so that what it says names the true number
    return [
        Leaf(
            path=a.path,
            want=a.value,
            got=b.value if b.in_state else align(a.value, b.value, counts),
            old=old.get(a.path) if a.in_state else None,
            copies_differ=b.copies_differ,
        )
        for a, b in zip(few(call), on_many, strict=True)
    ]


def _agrees(pair: tuple[Trial, Trial], call: Call, before: list[Leaf]) -> bool:
    """Whether the leaves that were wrong agree on another call."""
    pairs = zip(before, _run(pair, call), strict=True)
    return all(
        _distance(new) <= _REST * _distance(old) or new.gap <= NOISE_FACTOR * old.noise
        for old, new in pairs
        if old.verdict == "wrong"
    )


def _distance(leaf: Leaf) -> float:
    return leaf.gap / leaf.moved if leaf.moved else leaf.gap


def _bodies(pair: tuple[Trial, Trial], call: Call) -> tuple[Body, Body] | None:
    many, few = (trial.body(call) for trial in reversed(pair))
    return (few, many) if few and many else None


def _whole_rows(step: ParallelStep, call: Call, devices: int) -> tuple[Call, list[str]]:
    """Under remainder="drop" leave out the same rows on every count."""
    if step.remainder != "drop" or not step.batch_argnums:
        return call, []
    rows = placement.count_rows(call.args[step.batch_argnums[0]])
    kept = rows - rows % (devices * parts_on_each(step, devices))
    if kept in (0, rows):
        return call, []
    cut = map_batches(step, call, lambda b: placement.take_rows(b, slice(kept)))
    return cut, [
        f"remainder='drop': {rows - kept} of {rows} rows were left out on both"
    ]


def _row(leaf: Leaf, ratio: float) -> Row:
    return Row(leaf.path, leaf.verdict, leaf.difference, _note(leaf, ratio))


def _note(leaf: Leaf, ratio: float) -> str:
    """What the numbers of a wrong leaf say."""
    if leaf.copies_differ:
        return "copies differ"
    if leaf.verdict == "wrong" and not np.isfinite(leaf.gap):
        return "not finite"
    factor = factor_of(leaf)
    if factor is None or _near(factor, 1):
        return ""
    if _near(factor, ratio):
        return f"{factor:.2f} x = number of devices: summed, not averaged"
    if _near(factor, ratio**2):
        return f"{factor:.2f} x = number of devices, squared"
    return f"{factor:.2f} x"


def _near(factor: float, value: float) -> bool:
    return abs(factor / value - 1) < _REST
