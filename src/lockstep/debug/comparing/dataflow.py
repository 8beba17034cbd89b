"""What the jaxpr of a step in the device view tells about how it averages.

Read from what one device runs (`trials.Body`): which reductions get clipped values,
which random draws are the same on every device, and whether the new state depends on
the other devices at all.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from lockstep.debug.comparing.trials import Body
from lockstep.varying import (
    equations,
    inner_jaxprs,
    is_collective,
    varying_equations,
)

_DRAWS = {"random_bits", "random_gamma", "rng_bit_generator"}
_ROOTS = {"sqrt", "rsqrt", "pow", "integer_pow"}
_LIMITS = {"max", "min", "clamp"}
# What stands between a gradient and its clipped version.
_ELEMENTWISE = _LIMITS | {
    "add",
    "sub",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "div",
    "mul",
    "neg",
    "reshape",
    "select_n",
    "squeeze",
    "stop_gradient",
}


def row_draws(small: Body, large: Body) -> list[tuple[tuple[int, ...], bool]]:
    """The random draws whose size follows the number of rows.

    Args:
        small: the step on one device, with all rows.
        large: the step on N devices.

    Returns:
        For each draw its shape on one of the N devices, and whether the devices draw
        different numbers.
    """
    return [
        (shape, differs)
        for (whole, _), (shape, differs) in zip(_draws(small), _draws(large))  # noqa: B905
        if whole != shape
    ]


def clips_before_averaging(body: Body) -> bool:
    """Whether values are limited, by size or by norm, and then reduced over devices.

    The way from a reduction back to where the gradient was computed leads through
    elementwise operations alone. On it, a limit is clipping by size, and a factor that
    comes from a root is clipping by norm.
    """
    graph = _Graph(body.jaxpr)
    reduced = [
        var
        for eqn in equations(body.jaxpr)
        if is_collective(eqn, body.axis)
        for var in eqn.invars
    ]
    factors = []
    for eqn in graph.upstream(reduced, through=_ELEMENTWISE):
        if eqn.primitive.name in _LIMITS and eqn.outvars[0].aval.size > 1:
            return True
        if eqn.primitive.name in ("mul", "div"):
            factors += eqn.invars
    return any(
        eqn.primitive.name in _ROOTS and eqn.outvars[0].aval.size == 1
        for eqn in graph.upstream(factors, through=_ELEMENTWISE)
    )


def depends_on_other_devices(body: Body, output: int) -> bool:
    """Whether a collective is among all that an output was computed from."""
    graph = _Graph(body.jaxpr)
    upstream = graph.upstream([body.jaxpr.outvars[output]])
    return any(
        is_collective(inner, body.axis)
        for eqn in upstream
        for inner in (eqn, *(e for j in inner_jaxprs(eqn) for e in equations(j)))
    )


class _Graph:
    """Who computed what, through calls such as `jit`; loops are one operation."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self._made_by: dict[Any, Any] = {}
        self._same_as: dict[Any, list[Any]] = defaultdict(list)
        self._read(jaxpr)

    def upstream(
        self, variables: Iterable[Any], through: set[str] | None = None
    ) -> Iterator[Any]:
        """The equations that the variables were computed by.

        With `through` the search goes on behind these operations only; the first one
        of another kind is still yielded.
        """
        stack, seen = list(variables), set()
        while stack:
            var = stack.pop()
            if isinstance(var, core.Literal) or var in seen:
                continue
            seen.add(var)
            stack += self._same_as.get(var, ())
            eqn = self._made_by.get(var)
            if eqn is None:
                continue
            yield eqn
            if through is None or eqn.primitive.name in through:
                stack += eqn.invars

    def _read(self, jaxpr: core.Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            inner = _call_body(eqn)
            if inner is None:
                self._made_by.update(dict.fromkeys(eqn.outvars, eqn))
                continue
            for outside, inside in zip(eqn.invars, inner.invars, strict=True):
                self._same_as[inside].append(outside)
            for outside, inside in zip(eqn.outvars, inner.outvars, strict=True):
                self._same_as[outside].append(inside)
            self._read(inner)


def _call_body(eqn: Any) -> core.Jaxpr | None:
    """The jaxpr that an equation only calls (`jit`, `checkpoint`, `custom_jvp`)."""
    inner = inner_jaxprs(eqn)
    if eqn.primitive.name in ("scan", "while", "cond") or len(inner) != 1:
        return None
    sizes = len(inner[0].invars), len(inner[0].outvars)
    return inner[0] if sizes == (len(eqn.invars), len(eqn.outvars)) else None


def _draws(body: Body) -> list[tuple[tuple[int, ...], bool]]:
    """Shape of each random draw in the order of the program; do devices differ?"""
    return [
        (eqn.outvars[-1].aval.shape, marks[-1])
        for eqn, marks in varying_equations(body.jaxpr, body.varies, body.axis)
        if eqn.primitive.name in _DRAWS
    ]
