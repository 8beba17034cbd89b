"""Are the gradients of all parameters reduced over the axis? Read from the jaxpr.

In the device view a parameter is safe when its new value is the same on all devices
whatever their rows are. That is a question of data flow, so it is answered before the
first step: `varying` follows the rows through the step, and an all-reduce ends them.
"""

import dataclasses
from typing import Any

from jax.extend import core

from lockstep.jaxprs.varying import equations, is_collective, varying_outputs
from lockstep.step.parameters import parameter_paths
from lockstep.tree import is_static, named_leaves

# Collectives after which values may be equal on all devices, without a proof here.
_UNPROVEN = {"ppermute", "all_to_all", "psum_scatter", "reduce_scatter"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which parameters' gradients are reduced.

    Attributes:
        axis: the axis in the step's own collectives.
        reduced: parameters whose updates depend on the rows of all devices.
        missing: those whose new values differ between devices, as far as the
            analysis sees.
        idle: those that do not depend on the batch at all.
        others: further leaves of the state that differ, as running statistics.
        unproven: the collective that the analysis cannot follow, if the step has one.
    """

    axis: str
    reduced: tuple[str, ...]
    missing: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unproven: str = ""

    def __str__(self) -> str:
        """As `gradients of 12 of 12 parameters are reduced over data`."""
        count = len(self.reduced) + len(self.missing)
        text = (
            f"gradients of {len(self.reduced)} of {count} parameters are reduced over "
            f"{self.axis}"
        )
        if self.missing:
            text += f"; not reduced: {_listed(self.missing)}"
        if self.others:
            text += f"; also not reduced: {_listed(self.others)}"
        if self.idle:
            text += f"; not moved by the batch: {_listed(self.idle)}"
        return text

    def warnings(self) -> list[str]:
        """What to do about parameters that are not reduced."""
        odd = self.missing or self.others
        if not odd:
            return []
        if self.unproven:
            return [
                f"{_listed(odd)}: the step uses {self.unproven}, which this analysis "
                "cannot follow; the replicas are compared after the first step"
            ]
        what = "differ between the devices after one step"
        if self.missing:
            fix = (
                f"after jax.grad and before the update, grads = "
                f"lax.pmean(grads, {self.axis!r}) for all of them (a pmean inside the "
                "loss averages the loss, not its gradient)"
            )
        else:
            fix = f"lax.pmean(..., {self.axis!r}) before the step returns them"
        return [f"{_listed(odd)} {what}: {fix}"]


@dataclasses.dataclass(frozen=True)
class Body:
    """What one device runs.

    Attributes:
        jaxpr: the step; the leaves of the new state come first in its outputs.
        split: for each input, whether each device gets its own part.
        axis: the name of the axis in the step's collectives.
    """

    jaxpr: core.Jaxpr
    split: list[bool]
    axis: str


def find_body(jaxpr: core.Jaxpr, axis: str | int = 0) -> Body | None:
    """The first `shard_map` of a program; `None` if there is none.

    Args:
        jaxpr: a whole program.
        axis: the mesh axis of the rows, by its place in the mesh.
    """
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
            pairs = zip(eqn.invars, inner.invars, strict=True)
            split = [a.aval.shape != b.aval.shape for a, b in pairs]
            return Body(inner, split, str(eqn.params["mesh"].axis_names[axis]))
    return None


def judge(body: Body, state: Any, *, name: str = "state") -> Verdict | None:
    """The verdict for a step whose first argument and first outputs are `state`.

    The state is taken to be equal on all devices before the step, also where it comes
    as one row a device (`compat.pmap`).
    """
    paths = [path for path, leaf in named_leaves(state, name) if not is_static(leaf)]
    count = len(paths)
    if not count or len(body.jaxpr.outvars) < count:
        return None
    marks = [False] * count + body.split[count:]
    differs = varying_outputs(body.jaxpr, marks, body.axis)[:count]
    # On an axis that no collective names nothing ends what comes from the rows.
    follows = varying_outputs(body.jaxpr, marks, "\0no such axis")[:count]
    parameters = parameter_paths(state, name)
    found: dict[str, list[str]] = {"reduced": [], "missing": [], "idle": []}
    others = []
    for path, odd, moved in zip(paths, differs, follows, strict=True):
        if path in parameters:
            found["missing" if odd else "reduced" if moved else "idle"].append(path)
        elif odd:
            others.append(path)
    lists = {kind: tuple(names) for kind, names in found.items()}
    others = () if lists["missing"] else tuple(others)  # moments follow the gradient
    return Verdict(body.axis, **lists, others=others, unproven=_unproven(body))


def _unproven(body: Body) -> str:
    for eqn in equations(body.jaxpr):
        if eqn.primitive.name in _UNPROVEN and is_collective(eqn, body.axis):
            return eqn.primitive.name
    return ""


def _listed(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return ", ".join(paths[:8]) + more
