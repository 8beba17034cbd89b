"""Which values of a traced step differ between the devices of a mesh axis.

In the device view every device runs the step on its own shard. A value *varies* when
it can differ between devices: the shard does, the parameters do not, and an
all-reduce over the axis ends the variation. The answer errs on one side only: a
value said to be equal is equal; one said to vary may still be (a sum built from
`ppermute`, say), so whoever acts on it checks the values.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from lockstep.jaxprs.primitives import KEYED_DRAWS, KEYLESS_DRAWS

# Collectives whose result is the same on all devices of their axes.
_EQUALISING = {
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
}
_COLLECTIVES = _EQUALISING | {
    "ppermute",
    "all_to_all",
    "psum_scatter",
    "reduce_scatter",
    "pbroadcast",
}
# What each device does by itself.
_OWN = {"io_callback", "pure_callback"} | KEYLESS_DRAWS


def varying_outputs(
    closed_jaxpr: core.ClosedJaxpr, varies: Sequence[bool], axis_name: str
) -> list[bool]:
    """Whether each output of a jaxpr can differ between devices.

    Args:
        closed_jaxpr: a step traced for one device, with `axis_name` bound.
        varies: for each input, whether it differs between devices.
        axis_name: the mesh axis in question.

    Example:
        >>> import jax
        >>> def local(w, x):
        ...     return w, w * x, jax.lax.pmean(w * x, "data")
        >>> jaxpr = jax.make_jaxpr(local, axis_env=[("data", 8)])(1.0, 2.0)
        >>> varying_outputs(jaxpr, [False, True], "data")
        [False, True, False]
    """
    return _flow(_open(closed_jaxpr), list(varies), axis_name)


def varying_equations(
    closed_jaxpr: core.ClosedJaxpr | core.Jaxpr, varies: Sequence[bool], axis_name: str
) -> list[tuple[Any, list[bool]]]:
    """All equations at any depth, each with the marks of its outputs.

    An inner jaxpr that is called twice is listed twice; the body of a loop once, with
    the marks of its last round.
    """
    seen: list[tuple[Any, list[bool]]] = []
    _flow(_open(closed_jaxpr), list(varies), axis_name, seen)
    return seen


def used_as_keys(closed_jaxpr: core.ClosedJaxpr | core.Jaxpr) -> list[bool]:
    """Which inputs the step hands to `jax.random` as raw keys, by themselves.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def local(key, table):
        ...     return jax.random.bits(key), jax.random.bits(jax.random.key(table[0]))
        >>> raw = jnp.zeros(2, "uint32")
        >>> used_as_keys(jax.make_jaxpr(local)(raw, raw))
        [True, False]
    """
    jaxpr = _open(closed_jaxpr)
    keys: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap":
            keys.add(eqn.invars[0])
        outside = eqn.invars[eqn.primitive.name == "cond" :]
        for inner in inner_jaxprs(eqn):
            if len(inner.invars) == len(outside):
                flags = used_as_keys(inner)
                keys.update(v for v, flag in zip(outside, flags, strict=True) if flag)
    return [var in keys for var in jaxpr.invars]


def draws_equally(
    closed_jaxpr: core.ClosedJaxpr,
    varies: Sequence[bool],
    keys: Sequence[bool],
    axis_name: str,
) -> bool:
    """Whether devices draw the same random numbers for other rows, from the `keys`.

    Numbers that meet nothing that differs are to be the same, as the noise is that an
    optimizer adds to averaged gradients.
    """
    draws = varying_equations(closed_jaxpr, varies, axis_name)
    from_keys = varying_equations(closed_jaxpr, keys, "")  # no axis: plain dependence
    if len(draws) != len(from_keys):  # a loop whose trips vary hides its equations
        return False
    both = [
        (eqn.primitive.name in KEYED_DRAWS and any(depends), any(depends), any(differs))
        for (eqn, differs), (_, depends) in zip(draws, from_keys, strict=True)
    ]
    equal = any(draw and not differs for draw, _, differs in both)
    return equal and any(depends and differs for _, depends, differs in both)


def reduces_over(closed_jaxpr: core.ClosedJaxpr, axis_name: str) -> bool:
    """Whether a jaxpr holds any collective over the axis, at any depth."""
    return any(is_collective(eqn, axis_name) for eqn in equations(_open(closed_jaxpr)))


def named_axis_use(closed_jaxpr: core.ClosedJaxpr, axis_name: str) -> str | None:
    """The first primitive at any depth that names the axis, `axis_index` included."""
    for eqn in equations(_open(closed_jaxpr)):
        if axis_name in axes_of(eqn):
            return eqn.primitive.name
    return None


def is_collective(eqn: Any, axis_name: str) -> bool:
    """Whether an equation moves or reduces values over the axis."""
    return eqn.primitive.name in _COLLECTIVES and axis_name in axes_of(eqn)


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """The mesh axes that a collective is over."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list, set, frozenset)) else (axes,)


def equations(jaxpr: core.Jaxpr) -> Iterable[Any]:
    """All equations of a jaxpr, those of its inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def inner_jaxprs(eqn: Any) -> list[core.Jaxpr]:
    """The jaxprs among an equation's parameters (bodies of scans, calls, ...)."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.ClosedJaxpr, core.Jaxpr)):
                found.append(_open(item))
    return found


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many after them are carried.

    Counted by rank, for the parameter names differ between versions of JAX: a scanned
    input or stacked output has one axis more outside than in the body.
    """
    body = _open(eqn.params["jaxpr"])
    n_xs = sum(map(_rank_differs, eqn.invars, body.invars))
    n_carry = len(eqn.outvars) - sum(map(_rank_differs, eqn.outvars, body.outvars))
    return len(eqn.invars) - n_carry - n_xs, n_carry


def _flow(
    jaxpr: core.Jaxpr, varies: list[bool], axis: str, seen: list[Any] | None = None
) -> list[bool]:
    """Carry the marks of the inputs through a jaxpr to its outputs.

    Equations are added to `seen` with the marks of their outputs.
    """
    marks = dict(zip(jaxpr.invars, varies, strict=True))

    def mark(var: Any) -> bool:  # literals and constants are equal everywhere
        return not isinstance(var, core.Literal) and marks.get(var, False)

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [mark(v) for v in eqn.invars], axis, seen)
        if seen is not None:
            seen.append((eqn, outputs))
        marks.update(zip(eqn.outvars, outputs, strict=True))
    return [mark(v) for v in jaxpr.outvars]


def _equation(
    eqn: Any, inputs: list[bool], axis: str, seen: list[Any] | None
) -> list[bool]:
    name, n_out = eqn.primitive.name, len(eqn.outvars)
    if name == "axis_index" or name in _COLLECTIVES:
        if axis not in axes_of(eqn):
            return [any(inputs)] * n_out
        return [not _equalises(eqn)] * n_out
    if name in _OWN:
        return [True] * n_out
    if name == "scan":
        return _scan(eqn, inputs, axis, seen)
    if name == "while":
        return _while(eqn, inputs, axis, seen)
    if name == "cond":
        branches = [_flow(j, inputs[1:], axis, seen) for j in inner_jaxprs(eqn)]
        return [inputs[0] or any(marks) for marks in zip(*branches, strict=True)]
    inner = inner_jaxprs(eqn)
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):
        outputs = _flow(inner[0], inputs, axis, seen)
        if len(outputs) == n_out:
            return outputs
    sources = any(_makes_variation(e, axis) for j in inner for e in equations(j))
    return [any(inputs) or sources] * n_out


def _scan(
    eqn: Any, inputs: list[bool], axis: str, seen: list[Any] | None
) -> list[bool]:
    body = _open(eqn.params["jaxpr"])
    n_consts, n_carry = scan_parts(eqn)
    consts, xs = inputs[:n_consts], inputs[n_consts + n_carry :]
    carry = inputs[n_consts : n_consts + n_carry]
    while True:  # marks only grow, so this ends
        outputs = _flow(body, consts + carry + xs, axis)
        grown = [a or b for a, b in zip(carry, outputs[:n_carry], strict=True)]
        if grown == carry:
            if seen is not None:
                _flow(body, consts + carry + xs, axis, seen)
            return carry + outputs[n_carry:]
        carry = grown


def _while(
    eqn: Any, inputs: list[bool], axis: str, seen: list[Any] | None
) -> list[bool]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts = inputs[:n_cond]
    body_consts, carry = inputs[n_cond : n_cond + n_body], inputs[n_cond + n_body :]
    cond, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
    while True:
        if any(_flow(cond, cond_consts + carry, axis)):  # trip counts differ
            return [True] * len(carry)
        outputs = _flow(body, body_consts + carry, axis)
        grown = [a or b for a, b in zip(carry, outputs, strict=True)]
        if grown == carry:
            if seen is not None:
                _flow(body, body_consts + carry, axis, seen)
            return carry
        carry = grown


def _open(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _rank_differs(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) != len(inside.aval.shape)


def _equalises(eqn: Any) -> bool:
    groups = eqn.params.get("axis_index_groups")
    return eqn.primitive.name in _EQUALISING and groups is None


def _makes_variation(eqn: Any, axis: str) -> bool:
    name = eqn.primitive.name
    if name in _OWN:
        return True
    collective = name == "axis_index" or name in _COLLECTIVES
    return collective and axis in axes_of(eqn) and not _equalises(eqn)
