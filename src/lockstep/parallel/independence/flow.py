"""Do the rows of a batch meet inside a loss? Read from its jaxpr.

In the device view each device has rows of its own. A loss is the same on one device
and on many if each row is treated by itself and only a sum or a mean joins them in the
end. `follow` carries that through a traced loss. The answer errs on one side only:
what is a sum or a mean of independent rows here is one; `Met` may also be a thing
that the rules do not know.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from lockstep.jaxprs.primitives import DRAWS, ELEMENTWISE
from lockstep.jaxprs.varying import axes_of, inner_jaxprs, scan_parts
from lockstep.parallel.independence import shapes
from lockstep.parallel.independence.kinds import (
    Average,
    Free,
    Kind,
    Met,
    Rows,
    Sum,
    Uneven,
)

_LINEAR = {"neg", "convert_element_type", "copy", "reduce_precision", "stop_gradient"}
_KEYS = {"random_seed", "random_wrap", "random_unwrap", "random_fold_in"}
_KEYS |= {"random_split", "random_clone"}
_REDUCTIONS = {"reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
_REDUCTIONS |= {"argmax", "argmin", "reduce_sum"}
_CALLS = set(
    """jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr""".split()
)
_ADDITIONS = {"add", "sub", "add_any"}
_BENT = set(
    """abs cos erf exp exp2 expm1 log log1p logistic rsqrt sin sqrt square tanh
    integer_pow""".split()
)
_ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
_TINY = 1e-6  # what is added against a division by zero and changes nothing else


@dataclasses.dataclass(frozen=True)
class Follow:
    """Carries kinds through jaxprs.

    Attributes:
        rows: how many rows the shard has.
        axis_name: the mesh axis of the devices.
        devices: their number.
        least: what the mask sums up to at least, unless it is 0: 1 for whole numbers.
    """

    rows: int
    axis_name: str
    devices: int
    least: float = 1.0

    def __call__(self, jaxpr: core.Jaxpr, kinds: Sequence[Kind]) -> list[Kind]:
        """The kinds of the outputs from those of the inputs."""
        known = dict(zip(jaxpr.invars, kinds, strict=True))

        def kind(var: Any) -> Kind:
            if isinstance(var, core.Literal):
                number = None if shapes.all_axes(var) else _number(var.val)
                return Free(shapes.all_axes(var), number)
            return known.get(var) or Free(shapes.all_axes(var))

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [kind(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [kind(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        """The kinds of an equation's outputs."""
        name = eqn.primitive.name
        uneven = _uneven(kinds)
        if uneven and name in _ADDITIONS | {"select_n"}:
            return [uneven]  # nothing mends it that is added, or taken for 0 / 0
        met = next((kind for kind in kinds if isinstance(kind, Met)), None)
        if met and not (uneven and name in _CALLS):
            return [met] * len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, kinds)
        if name == "while":
            return self._while(eqn, kinds)
        if name == "cond":
            return self._cond(eqn, kinds)
        if name in _CALLS:
            outputs = self(inner_jaxprs(eqn)[0], kinds)
            return [_called(eqn, kind) for kind in outputs]
        if name in ("psum", "psum_invariant", "psum2", "all_gather"):
            return [self._collective(eqn, kind) for kind in kinds]
        if name in ("optimization_barrier", "sharding_constraint", "name"):
            return kinds
        return [self._one(eqn, kinds)] * len(eqn.outvars)

    def _one(self, eqn: Any, kinds: list[Kind]) -> Kind:
        """The kind of all outputs of an equation without inner jaxprs."""
        name = eqn.primitive.name
        if name in ELEMENTWISE:
            return self._elementwise(eqn, kinds)
        if name == "bitcast_convert_type" and shapes.same_shape(eqn):
            return self._elementwise(eqn, kinds)
        if name in DRAWS:
            return self._draw(eqn, kinds)
        if name in _KEYS and isinstance(kinds[0], Rows):
            return kinds[0]
        if all(isinstance(kind, Free) for kind in kinds):
            return shapes.free(eqn, kinds)
        if name in _REDUCTIONS:
            return self._reduction(eqn, kinds[0])
        if name in _ALONG:
            return self._apart_from(eqn, kinds, eqn.params["axis"])
        if name == "sort":
            return self._apart_from(eqn, kinds, eqn.params["dimension"])
        if name == "top_k":
            return self._apart_from(eqn, kinds, len(eqn.invars[0].aval.shape) - 1)
        axis = shapes.moved_rows(eqn, kinds, self.rows)
        if axis is not None:
            return Rows(axis)
        if name == "dot_general":
            if all(_over_rows(kind) for kind in kinds):
                return Uneven(eqn)
            return shapes.dot_over_rows(eqn, kinds) or Met(eqn)
        return shapes.rearranged(eqn, kinds) or Met(eqn)

    def _draw(self, eqn: Any, kinds: list[Kind]) -> Kind:
        """Other numbers on other devices are what draws are: the key may vary.

        Other inputs may not, as the shape parameters of `jax.random.gamma`.
        """
        key, *others = kinds
        if isinstance(key, Free):
            return self._elementwise(eqn, [Free(), *others])
        if eqn.primitive.name == "rng_bit_generator":  # mixes all words of its key
            return Met(eqn)
        return self._elementwise(eqn, kinds)

    def _apart_from(self, eqn: Any, kinds: list[Kind], axis: int) -> Kind:
        """What mixes values along one axis, which must not be that of the rows."""
        rows = shapes.common_rows(kinds)
        return Met(eqn) if rows in (None, axis) else Rows(rows)

    def _elementwise(self, eqn: Any, kinds: list[Kind]) -> Kind:
        if all(isinstance(kind, Free) for kind in kinds):
            return shapes.free(eqn, kinds)
        if any(isinstance(kind, Rows) for kind in kinds):
            rows = shapes.common_rows(kinds)
            if rows is None:
                return Met(eqn)
            same = eqn.primitive.name in _LINEAR and getattr(kinds[0], "mask", False)
            return Rows(rows, mask=same)
        return self._of_sums(eqn, kinds) or Met(eqn)

    def _of_sums(self, eqn: Any, kinds: list[Kind]) -> Kind | None:
        """Linear arithmetic with sums and means over the rows."""
        name, first = eqn.primitive.name, kinds[0]
        if name in _LINEAR:
            return first
        if name in _BENT and eqn.params.get("y") not in (0, 1):
            return Uneven(eqn) if _over_rows(first) else None
        if len(kinds) != 2:
            return None
        other = kinds[1]
        if name in _ADDITIONS and type(first) is type(other):
            return first if first == other else None
        if name in _ADDITIONS or name == "max":
            return _with_number(name, kinds, self.least)
        if name == "mul" and _any_free(kinds):
            return _unmasked(other if isinstance(first, Free) else first)
        if name == "mul" and _over_rows(first) and _over_rows(other):
            return Uneven(eqn)
        return self._quotient(eqn, first, other) if name == "div" else None

    def _quotient(self, eqn: Any, first: Kind, other: Kind) -> Kind | None:
        """A sum or a mean over the rows, divided."""
        number = other.number if isinstance(other, Free) else None
        if isinstance(first, Sum) and isinstance(other, Sum) and other.mask:
            return Average(masked=True)
        if _over_rows(other):
            return None if isinstance(first, Uneven) else Uneven(eqn)
        if isinstance(first, Sum) and first.raised:
            return None
        if isinstance(first, Sum) and number is not None:
            is_size = number > 0 and number % self.rows == 0
            if is_size and first.size % number == 0:
                return Average()
        if isinstance(first, Average) and first.devices:
            return (
                Free(shapes.all_axes(eqn.outvars[0]))
                if (number == self.devices)
                else None
            )
        return _unmasked(first) if isinstance(other, Free) else None

    def _reduction(self, eqn: Any, kind: Kind) -> Kind:
        axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
        name = eqn.primitive.name
        if isinstance(kind, Rows) and kind.axis not in axes:
            return Rows(kind.axis - sum(axis < kind.axis for axis in axes))
        if name != "reduce_sum":
            return Met(eqn)
        size = math.prod(shape[axis] for axis in axes)
        if isinstance(kind, Rows):
            return Sum(size, mask=kind.mask)
        if isinstance(kind, Sum):
            return dataclasses.replace(kind, size=kind.size * size, mask=False)
        return kind

    def _collective(self, eqn: Any, kind: Kind) -> Kind:
        """Over the devices: what all rows went into is the same everywhere."""
        axes = axes_of(eqn)
        everywhere = Free(shapes.all_axes(eqn.outvars[0]))
        if self.axis_name not in axes:
            return kind
        if eqn.params.get("axis_index_groups") is not None or len(axes) > 1:
            return Met(eqn)
        if eqn.primitive.name == "all_gather":
            return everywhere if isinstance(kind, Rows) else Met(eqn)
        if isinstance(kind, Sum) and not kind.raised:
            return everywhere
        if isinstance(kind, Average) and not kind.masked:
            return Average(devices=True)
        return Met(eqn)

    def _cond(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        if not isinstance(kinds[0], Free):
            return [Met(eqn)] * len(eqn.outvars)
        branches = [self(inner, kinds[1:]) for inner in inner_jaxprs(eqn)]
        return [_join(eqn, same) for same in zip(*branches, strict=True)]

    def _scan(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        n_consts, n_carry = scan_parts(eqn)
        consts, carry = kinds[:n_consts], kinds[n_consts : n_consts + n_carry]
        xs = [shapes.inside_scan(eqn, kind) for kind in kinds[n_consts + n_carry :]]
        body = inner_jaxprs(eqn)[0]
        carry, ys = self._settle(eqn, body, [consts, carry, xs], n_carry)
        return carry + [shapes.outside_scan(eqn, kind) for kind in ys]

    def _while(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = (eqn.params[k].jaxpr for k in ("cond_jaxpr", "body_jaxpr"))
        consts, carry = kinds[n_cond : n_cond + n_body], kinds[n_cond + n_body :]
        carry, _ = self._settle(eqn, body, [consts, carry, []], len(carry))
        (ends,) = self(cond, kinds[:n_cond] + carry)
        # How often a loop turns may depend on no row: it turns for all of them.
        return carry if isinstance(ends, Free) else [Met(eqn)] * len(carry)

    def _settle(
        self, eqn: Any, body: core.Jaxpr, kinds: list[list[Kind]], n_carry: int
    ) -> tuple[list[Kind], list[Kind]]:
        """Kinds of a carry that no round of a loop changes, and of the rest."""
        consts, carry, xs = kinds
        while True:
            outputs = self(body, consts + carry + xs)
            joined = [
                _join(eqn, pair) for pair in zip(carry, outputs[:n_carry], strict=True)
            ]
            if joined == carry:
                return carry, outputs[n_carry:]
            carry = joined


def _join(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    """One kind for values that take each other's place."""
    first = kinds[0]
    if all(kind == first for kind in kinds):
        return first
    for kind in kinds:
        if isinstance(kind, Met):
            return kind
    if uneven := _uneven(kinds):
        return uneven
    if all(isinstance(kind, Free) for kind in kinds):
        return Free(frozenset().union(*(k.varies for k in kinds)))  # pyright: ignore
    rows = shapes.common_rows(kinds)
    return Met(eqn) if rows is None else Rows(rows)


def _number(value: Any) -> float | None:
    return float(value) if np.ndim(value) == 0 and np.isrealobj(value) else None


def _called(eqn: Any, kind: Kind) -> Kind:
    met = isinstance(kind, (Met, Uneven))
    return dataclasses.replace(kind, caller=eqn) if met else kind


def _uneven(kinds: Sequence[Kind]) -> Uneven | None:
    return next((kind for kind in kinds if isinstance(kind, Uneven)), None)


def _over_rows(kind: Kind) -> bool:
    """Whether it is a sum or a mean over the rows of one shard, and no count."""
    if isinstance(kind, Average):
        return not kind.devices
    return isinstance(kind, Sum) and not kind.mask


def _any_free(kinds: Sequence[Kind]) -> bool:
    return any(isinstance(kind, Free) for kind in kinds)


def _unmasked(kind: Kind) -> Kind:
    """A multiple of a sum is a sum, but no longer that of the mask."""
    return dataclasses.replace(kind, mask=False) if isinstance(kind, Sum) else kind


def _with_number(name: str, kinds: Sequence[Kind], least: float) -> Kind | None:
    """A sum or a mean over the rows to which a number is added, or with a least one."""
    if not _any_free(kinds):
        return None
    known, free = kinds if isinstance(kinds[1], Free) else kinds[::-1]
    number = free.number if isinstance(free, Free) else None
    if isinstance(known, Sum):
        if number is not None and abs(number) <= _TINY:
            return known
        if name != "max":
            return None
        kept = known.mask and number is not None and number <= least  # for 0 / 0
        return dataclasses.replace(known, mask=kept, raised=True)
    added = isinstance(known, Average) and not known.devices and name != "max"
    return known if added else None
