"""A jaxpr evaluated with every intermediate value looked at: is there NaN, infinity?

One compile and one run tell it of all values at once; which one came first is then a
matter of reading (see `origin`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from lockstep.jaxprs.varying import inner_jaxprs, scan_parts

# Of one value: does it hold NaN, does it hold an infinity. `[2]`, in a scan `[T, 2]`.
Flags = Any


@dataclasses.dataclass
class Checks:
    """What was seen in one jaxpr.

    Attributes:
        inputs: the flags of its inputs.
        equations: for each equation the flags of its outputs, and what was seen in
            the jaxpr inside, where that was looked into.
    """

    inputs: list[Flags]
    equations: list[tuple[list[Flags], "Checks | None"]]


jax.tree_util.register_dataclass(
    Checks, data_fields=["inputs", "equations"], meta_fields=[]
)


def check(closed: core.ClosedJaxpr, leaves: list[Any]) -> Checks:
    """Run a jaxpr on values and look at everything in it; the flags are on the host."""
    avals = [var.aval for var in closed.jaxpr.invars]
    args = [_as(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
    run = jax.jit(lambda args: _run(closed.jaxpr, closed.consts, args)[1])
    return jax.device_get(run(args))


def body_of(eqn: Any) -> core.Jaxpr | None:
    """The jaxpr inside an equation that is looked into: calls, scans, shard_map."""
    if not isinstance(eqn.primitive.name, str) or eqn.primitive.name == "while":
        return None
    inner = inner_jaxprs(eqn)
    one = len(inner) == 1 and len(inner[0].invars) == len(eqn.invars)
    return inner[0] if one and len(inner[0].outvars) == len(eqn.outvars) else None


def _as(leaf: Any, aval: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return leaf
    return jnp.asarray(leaf, aval.dtype)


def _run(jaxpr: core.Jaxpr, consts: Any, args: Any) -> tuple[list[Any], Checks]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    seen = []
    for eqn in jaxpr.eqns:
        outputs, inside = _equation(jaxpr, eqn, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
        seen.append(([_flags(x) for x in outputs], inside))
    return [read(v) for v in jaxpr.outvars], Checks([_flags(x) for x in args], seen)


def _equation(
    jaxpr: core.Jaxpr, eqn: Any, inputs: list[Any]
) -> tuple[list[Any], Checks | None]:
    body = body_of(eqn)
    if body is None:
        return _plain(jaxpr, eqn, inputs), None
    consts = _constants(eqn, body)
    if eqn.primitive.name == "scan":
        return _scan(eqn, body, consts, inputs)
    if eqn.primitive.name != "shard_map":
        return _run(body, consts, inputs)
    # On the one device of a replay a shard is the whole.
    whole = PartitionSpec()
    return jax.shard_map(
        lambda *args: _run(body, consts, args),
        mesh=eqn.params["mesh"],
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )(*inputs)


def _plain(jaxpr: core.Jaxpr, eqn: Any, inputs: list[Any]) -> list[Any]:
    """One equation of a jaxpr as JAX evaluates it."""
    kept = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    if not kept:  # a debugging callback
        return [None] * len(eqn.outvars)
    values = {
        var: value
        for var, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(var, core.Literal)
    }
    alone = jaxpr.replace(
        constvars=[],
        invars=list(values),
        outvars=kept,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    outputs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*values.values())
    made = dict(zip(kept, outputs, strict=True))
    return [made.get(var) for var in eqn.outvars]


def _scan(
    eqn: Any, body: core.Jaxpr, consts: Any, inputs: list[Any]
) -> tuple[list[Any], Checks]:
    n_consts, n_carry = scan_parts(eqn)
    fixed, first = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def one(carry: Any, xs: Any) -> Any:
        outputs, checks = _run(body, consts, [*fixed, *carry, *xs])
        return outputs[:n_carry], (outputs[n_carry:], checks)

    carry, (ys, checks) = jax.lax.scan(
        one,
        first,
        inputs[n_consts + n_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *ys], checks


def _constants(eqn: Any, body: core.Jaxpr) -> Any:
    """The values of an inner jaxpr's constants."""
    for value in eqn.params.values():
        if getattr(value, "jaxpr", None) is body:
            return value.consts
    return ()


def _flags(x: Any) -> Flags:
    if x is None or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.zeros(2, bool)
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])
