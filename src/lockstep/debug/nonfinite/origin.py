"""Where a NaN or an infinity that left a step was made: the operation, the line.

`jax_debug_nans` stops at the first NaN, also at one that `jnp.where` throws away, and
inside `shard_map` names no line. Here the bad value is followed from the outputs back
to the operation that made it from good ones.
"""

import dataclasses
import linecache
from typing import Any

import jax
import numpy as np
from jax.extend import core

from lockstep.debug.nonfinite.checked import Checks, body_of, check
from lockstep.jaxprs.source_lines import source_line

NAN, INF = 0, 1


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that made a bad value.

    Attributes:
        kind: "nan" or "inf".
        operation: its name in JAX, such as `log`.
        file: the user's file, "" where no line is known.
        line: its line, from 1.
        function: the function that the line is in.
        cause: what made the infinity that became NaN here.
    """

    kind: str
    operation: str
    file: str = ""
    line: int = 0
    function: str = ""
    cause: "Origin | None" = None

    def __str__(self) -> str:
        """The operation, the place, the text of the line."""
        text = f"{self.kind} made by `{self.operation}`"
        if self.file:
            text += f" at {self.file}:{self.line} in {self.function}"
            if source := linecache.getline(self.file, self.line).strip():
                text += f": {source}"
        if self.cause:
            text += f"\n  from an {self.cause}"
        return text


# Of one value: the origins of its NaN and its infinity, `None` where it has none. An
# input that is bad itself has the origin _GIVEN.
_Marks = tuple[Origin | None, Origin | None]
_CLEAN: _Marks = (None, None)
_GIVEN = (Origin("nan", "an input"), Origin("inf", "an input"))


def find_origin(closed: core.ClosedJaxpr, leaves: list[Any]) -> Origin | None:
    """The operation that made the first NaN (or infinity) among the outputs.

    Returns:
        `None` where the outputs are finite, or only hold what the inputs held.

    Example:
        >>> def loss(x):
        ...     return jnp.where(x > 5, jnp.log(-x), jnp.sqrt(x)).sum()
        >>> jaxpr = jax.make_jaxpr(loss)(jnp.ones(2))
        >>> origin = find_origin(jaxpr, [np.array([1.0, -1.0])])
        >>> origin.kind, origin.operation, origin.function
        ('nan', 'sqrt', 'loss')
    """
    checks = check(closed, leaves)
    given = [_given(flags) for flags in checks.inputs]
    outputs = _follow(closed.jaxpr, checks, given)
    for kind in (NAN, INF):
        for marks in outputs:
            if marks[kind] is not None:
                return None if marks[kind] in _GIVEN else marks[kind]
    return None


def _given(flags: Any) -> _Marks:
    nan, inf = np.any(np.reshape(flags, (-1, 2)), axis=0)
    return (_GIVEN[NAN] if nan else None, _GIVEN[INF] if inf else None)


def _follow(jaxpr: core.Jaxpr, checks: Checks, inputs: list[_Marks]) -> list[_Marks]:
    """Carry the origins through a jaxpr to its outputs."""
    marks: dict[Any, _Marks] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> _Marks:
        if isinstance(var, core.Literal):
            return _literal(var.val)
        return marks.get(var, _CLEAN)

    for eqn, (flags, inside) in zip(jaxpr.eqns, checks.equations, strict=True):
        sources = [read(var) for var in eqn.invars]
        inner = _inside(eqn, inside, sources)
        for i, var in enumerate(eqn.outvars):
            known = inner[i] if inner else _first(sources)
            marks[var] = _mark(eqn, np.asarray(flags[i]), known, _first(sources))
    return [read(var) for var in jaxpr.outvars]


def _mark(eqn: Any, flags: np.ndarray, known: _Marks, sources: _Marks) -> _Marks:
    """The origins of one output: known ones, or this equation."""
    nan, inf = np.any(np.reshape(flags, (-1, 2)), axis=0)
    cause = sources[INF] if sources[INF] not in _GIVEN else None
    return (
        (known[NAN] or _origin(eqn, "nan", cause)) if nan else None,
        (known[INF] or _origin(eqn, "inf", None)) if inf else None,
    )


def _inside(
    eqn: Any, checks: Checks | None, sources: list[_Marks]
) -> list[_Marks] | None:
    body = body_of(eqn)
    if body is None or checks is None:
        return None
    if eqn.primitive.name == "scan":
        checks = _first_bad_round(checks, backwards=eqn.params["reverse"])
        # What the loop itself made before this round is not bad yet.
        sources = [
            _only(marks, flags)
            for marks, flags in zip(sources, checks.inputs, strict=True)
        ]
    return _follow(body, checks, sources)


def _first_bad_round(checks: Checks, backwards: bool) -> Checks:
    """What was seen in the first round of a scan that saw a NaN, else an infinity."""
    every = [np.asarray(f) for flags, _ in checks.equations for f in flags]
    seen = np.stack(every, 1).any(1) if every else np.zeros((1, 2), bool)
    order = slice(None, None, -1) if backwards else slice(None)
    rounds = np.arange(len(seen))[order]
    bad = [r for kind in (NAN, INF) for r in rounds if seen[r, kind]]
    chosen = bad[0] if bad else 0
    return jax.tree.map(lambda x: x[chosen], checks)


def _only(marks: _Marks, flags: Any) -> _Marks:
    nan, inf = np.any(np.reshape(flags, (-1, 2)), axis=0)
    return (marks[NAN] if nan else None, marks[INF] if inf else None)


def _first(sources: list[_Marks]) -> _Marks:
    """The origins that reach an equation; one that was made, before a given one."""

    def pick(kind: int) -> Origin | None:
        found = [m[kind] for m in sources if m[kind] is not None]
        made = [origin for origin in found if origin not in _GIVEN]
        return next(iter(made + found), None)

    return pick(NAN), pick(INF)


def _literal(value: Any) -> _Marks:
    if not np.issubdtype(np.asarray(value).dtype, np.inexact):
        return _CLEAN
    nan, inf = np.isnan(value).any(), np.isinf(value).any()
    return (
        Origin("nan", "a constant") if nan else None,
        Origin("inf", "a constant") if inf else None,
    )


def _origin(eqn: Any, kind: str, cause: Origin | None) -> Origin:
    operation, line = eqn.primitive.name, source_line(eqn)
    if line is None:
        return Origin(kind, operation, cause=cause)
    return Origin(kind, operation, line.file, line.line, line.function, cause)
