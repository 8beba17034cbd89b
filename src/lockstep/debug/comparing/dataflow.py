"""What the jaxpr of a step in the device view tells about how it averages.

Read from what one device runs (`trials.Body`): which reductions get clipped values,
which random draws are the same on every device, and whether the new state depends on
the other devices at all.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from lockstep.debug.comparing.trials import Body
from lockstep.jaxprs.primitives import DRAWS
from lockstep.jaxprs.varying import (
    equations,
    inner_jaxprs,
    is_collective,
    varying_equations,
)

_ROOTS = {"sqrt", "rsqrt", "pow"}
_LIMITS = {"max", "min", "clamp"}
# What stands between a gradient and its clipped version.
_BETWEEN = _LIMITS | {
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

_Value = tuple[Any, int]  # a variable and its scope


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
    comes from a root is clipping by norm, if it is each device's own.
    """
    graph = _Graph(body.jaxpr)
    own = {
        id(eqn)
        for eqn, differs in varying_equations(body.jaxpr, body.varies, body.axis)
        if any(differs)
    }
    reduced = [
        (var, scope)
        for eqn, scope in graph.operations
        if is_collective(eqn, body.axis)
        for var in eqn.invars
    ]
    factors = []
    for eqn, scope in graph.upstream(reduced, through=_BETWEEN):
        if eqn.primitive.name in _LIMITS and eqn.outvars[0].aval.size > 1:
            return True
        if eqn.primitive.name in ("mul", "div"):
            factors += [(var, scope) for var in eqn.invars]
    return any(
        eqn.primitive.name in _ROOTS and eqn.outvars[0].aval.size == 1
        for eqn, _ in graph.upstream(factors, through=_BETWEEN)
        if id(eqn) in own
    )


def depends_on_other_devices(body: Body, output: int) -> bool:
    """Whether a collective is among all that an output was computed from."""
    graph = _Graph(body.jaxpr)
    upstream = graph.upstream([(body.jaxpr.outvars[output], 0)])
    return any(
        is_collective(inner, body.axis)
        for eqn, _ in upstream
        for inner in (eqn, *(e for j in inner_jaxprs(eqn) for e in equations(j)))
    )


class _Graph:
    """Who computed what, through calls such as `jit`; loops are one operation.

    JAX shares the jaxpr of a function that is called twice, so a value is a variable
    and a scope: the number of the call that it is in.

    Attributes:
        operations: all equations but the calls, each with its scope.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.operations: list[tuple[Any, int]] = []
        self._made_by: dict[_Value, Any] = {}
        self._same_as: dict[_Value, _Value] = {}
        self._scopes = 0
        self._read(jaxpr, 0)

    def upstream(
        self, values: Iterable[_Value], through: set[str] | None = None
    ) -> Iterator[tuple[Any, int]]:
        """The equations that values were computed by, with their scopes.

        With `through` the search goes on behind these operations only; the first one
        of another kind is still yielded.
        """
        stack, seen = list(values), set()
        while stack:
            value = stack.pop()
            if isinstance(value[0], core.Literal) or value in seen:
                continue
            seen.add(value)
            if value in self._same_as:
                stack.append(self._same_as[value])
            elif value in self._made_by:
                eqn, scope = self._made_by[value], value[1]
                yield eqn, scope
                if through is None or eqn.primitive.name in through:
                    stack += [(var, scope) for var in eqn.invars]

    def _read(self, jaxpr: core.Jaxpr, scope: int) -> None:
        for eqn in jaxpr.eqns:
            called = _call_body(eqn)
            if called is None:
                self.operations.append((eqn, scope))
                self._made_by.update(((var, scope), eqn) for var in eqn.outvars)
            for inner in [called] if called else inner_jaxprs(eqn):
                self._scopes += 1
                if called:
                    self._connect(eqn, scope, inner, self._scopes)
                self._read(inner, self._scopes)

    def _connect(self, eqn: Any, outer: int, inner: core.Jaxpr, scope: int) -> None:
        """A call hands its inputs in and its outputs out."""
        for outside, inside in zip(eqn.invars, inner.invars, strict=True):
            self._same_as[inside, scope] = outside, outer
        for outside, inside in zip(eqn.outvars, inner.outvars, strict=True):
            self._same_as[outside, outer] = inside, scope


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
        if eqn.primitive.name in DRAWS
    ]
