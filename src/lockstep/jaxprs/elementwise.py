"""Is an update elementwise, and the same for every leaf? Read from its jaxpr.

Small leaves can be joined into one vector, or a vector cut into slices, without a
change of meaning, if an optimizer treats every number of every leaf by one formula. A
trial step proves nothing (under a warm-up from 0 every optimizer does nothing), so
the update is traced in both forms, and each output is read as a formula of its inputs:
the two forms are the same if they have the same formulas.

A formula may hold sums over whole leaves where all leaves of a slot are summed alike,
as in a global norm: the sum over the joined vector is then the same number.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from lockstep.jaxprs.primitives import ELEMENTWISE
from lockstep.jaxprs.varying import inner_jaxprs

_REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max"}
_JOINS = {"add": "add", "add_any": "add", "max": "max"}
_RESHAPES = {"reshape", "broadcast_in_dim"}
_CONTROL = {"scan", "while", "cond"}
# Which say where or how large a result is, not what is computed.
_NO_MEANING = {"sharding", "weak_type", "shape", "broadcast_dimensions", "out_sharding"}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What an input or output of an update is: one leaf of a tree like the parameters.

    Attributes:
        role: which tree, such as "grads".
        number: which leaf of that tree.
        slot: where the leaf goes in the joined form; there, the leaf itself.
    """

    role: str
    number: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of an update: a function, and what its leaves are.

    Attributes:
        fn: a function of arrays.
        args: descriptions of its arguments.
        inputs: for each leaf of `args` what it is; `None` for a value common to all.
        outputs: the same for each leaf of the result.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: Sequence[Leaf | None]
    outputs: Sequence[Leaf | None]


class NotElementwise(Exception):
    """Says why, in words that follow "the optimizer"."""


def check_same(whole: Form, parts: Form, *, sums: bool = True) -> None:
    """Check that two forms of an update compute the same, number by number.

    Args:
        whole: on the leaves as they are.
        parts: with one leaf for each slot.
        sums: whether sums over all numbers of a slot are allowed.

    Raises:
        NotElementwise: they do not, or it cannot be seen.

    Example:
        >>> def scale(leaves):
        ...     return [2 * x for x in leaves]
        >>> a, b, ab = (jax.ShapeDtypeStruct((n,), "float32") for n in (2, 3, 5))
        >>> two = [Leaf("grads", 0, slot=0), Leaf("grads", 1, slot=0)]
        >>> one = [Leaf("grads", 0, slot=0)]
        >>> check_same(Form(scale, ([a, b],), two, two), Form(scale, ([ab],), one, one))
    """
    table: dict[Any, int] = {}
    want = _formulas(whole, table, sums)
    try:
        got = _formulas(parts, table, sums)
    except NotElementwise:
        raise
    except Exception as error:  # written for the tree's own names or ranks
        raise NotElementwise(f"fails on joined leaves ({error})") from error
    for key in want.keys() | got.keys():
        if want.get(key) != got.get(key):
            raise NotElementwise("treats leaves by their shape, rank, path or order")


def _formulas(form: Form, table: dict[Any, int], sums: bool) -> dict[Any, int]:
    """The formula of each output: by role and slot, the common ones by their order."""
    closed = jax.make_jaxpr(form.fn)(*form.args)
    reader = _Reader(table, form.inputs, sums)
    given = reader.inputs(closed.jaxpr.invars, form.inputs)
    values = reader.read(closed.jaxpr, closed.consts, given)
    found: dict[Any, int] = {}
    common = itertools.count()
    for value, leaf in zip(values, form.outputs, strict=True):
        value = reader.settle(value)
        if leaf is None:
            if value.leaf is not None:
                raise NotElementwise("makes a value for all leaves from one of them")
            found[next(common)] = value.formula
            continue
        if value.leaf not in (None, leaf.number) or not value.flat:
            raise NotElementwise("moves numbers from one leaf to another")
        if found.setdefault((leaf.role, leaf.slot), value.formula) != value.formula:
            raise NotElementwise("treats some leaves in another way than others")
    return found


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value in a jaxpr.

    Attributes:
        formula: of each of its numbers.
        leaf: the leaf whose numbers it follows; `None` for a value common to all.
        flat: whether it has one number for each of the leaf's, or one for all.
        terms: of a sum over leaves: which leaves, each with the formula in the sum.
        kind: how the terms are joined, "add" or "max".
    """

    formula: int
    leaf: int | None = None
    flat: bool = True
    terms: frozenset[tuple[int, int]] = frozenset()
    kind: str = ""


class _Reader:
    """Reads jaxprs as formulas, which are numbered in one table."""

    def __init__(
        self, table: dict[Any, int], inputs: Sequence[Leaf | None], sums: bool
    ) -> None:
        self._table, self._sums = table, sums
        self._slots = {x.number: x.slot for x in inputs if x is not None}

    def inputs(
        self, variables: Sequence[Any], leaves: Sequence[Leaf | None]
    ) -> list[_Value]:
        """What the inputs of an update are."""
        common, found = itertools.count(), []
        for var, leaf in zip(variables, leaves, strict=True):
            name = next(common) if leaf is None else leaf.role
            formula = self._number("input", name, var.aval.dtype)
            if leaf is None:
                found.append(_Value(formula, flat=not var.aval.shape))
            else:
                found.append(_Value(formula, leaf.number))
        return found

    def read(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: list[_Value]
    ) -> list[_Value]:
        """The outputs of a jaxpr."""
        known = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def value(var: Any) -> _Value:
            return (
                self._constant(var.val) if isinstance(var, core.Literal) else known[var]
            )

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [value(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def settle(self, value: _Value) -> _Value:
        """A sum over leaves as one number, if it takes in whole slots alike."""
        if not value.terms:
            return value
        terms = {(self._slots[leaf], formula) for leaf, formula in value.terms}
        slots = {slot for slot, _ in terms}
        members = {leaf for leaf, slot in self._slots.items() if slot in slots}
        if len(terms) > len(slots) or len(value.terms) < len(members):
            raise NotElementwise("takes a sum or norm of some leaves by themselves")
        return _Value(self._number("total", value.kind, frozenset(terms)))

    def _equation(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        name, inner = eqn.primitive.name, inner_jaxprs(eqn)
        if name not in _CONTROL and len(inner) == 1:
            if len(inner[0].invars) == len(ins):
                return self.read(inner[0], _consts_of(eqn), ins)
        if name == "optimization_barrier":
            return ins
        joined = self._join(eqn, ins)
        if joined:
            return [joined]
        ins = [self.settle(value) for value in ins]
        leaves = {value.leaf for value in ins if value.leaf is not None}
        if not leaves:
            return self._common(eqn, ins)
        if len(leaves) > 1:
            raise NotElementwise(f"combines leaves{_by(eqn)}")
        shape = eqn.outvars[0].aval.shape
        if name in _RESHAPES and shape == eqn.invars[0].aval.shape:
            return ins[:1]
        if name in _REDUCTIONS and len(eqn.params["axes"]) == _rank(eqn.invars[0]):
            if not self._sums:
                raise NotElementwise(f"takes a sum or norm{_by(eqn)}")
            terms = frozenset({(leaf, ins[0].formula) for leaf in leaves})
            return [_Value(-1, terms=terms, kind=_REDUCTIONS[name])]
        given = zip(eqn.invars, ins, strict=True)
        kept = all(v.leaf is None or var.aval.shape == shape for var, v in given)
        if name not in ELEMENTWISE or not kept or not all(v.flat for v in ins):
            raise NotElementwise(f"is not elementwise{_by(eqn)}")
        return [_Value(self._call(eqn, ins), leaves.pop())]

    def _join(self, eqn: Any, ins: list[_Value]) -> _Value | None:
        """The sum of two sums over different leaves, as a longer one."""
        kind = _JOINS.get(eqn.primitive.name)
        if kind is None or not any(value.terms for value in ins):
            return None
        terms: list[frozenset[tuple[int, int]]] = []
        for value, var in zip(ins, eqn.invars, strict=True):
            if value.terms and value.kind == kind:
                terms.append(value.terms)
            elif value.leaf is not None and not var.aval.shape:  # its own sum
                terms.append(frozenset({(value.leaf, value.formula)}))
            elif kind == "add" and isinstance(var, core.Literal) and var.val == 0:
                terms.append(frozenset())  # where Python's sum begins
            else:
                return None
        if terms[0] & terms[1]:
            return None
        return _Value(-1, terms=terms[0] | terms[1], kind=kind)

    def _common(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        """The results of an equation that touches no leaf."""
        name = eqn.primitive.name
        if eqn.effects:
            raise NotElementwise(f"has effects{_by(eqn)}")
        if name == "broadcast_in_dim" and ins[0].flat:
            return [dataclasses.replace(ins[0])]
        if name in ELEMENTWISE:
            flat = all(value.flat for value in ins)
            return [_Value(self._call(eqn, ins), flat=flat)]
        shapes = [str(var.aval) for var in (*eqn.invars, *eqn.outvars)]
        call = self._call(eqn, ins, *shapes)
        return [
            _Value(self._number("result", i, call), flat=not var.aval.shape)
            for i, var in enumerate(eqn.outvars)
        ]

    def _call(self, eqn: Any, ins: list[_Value], *more: Any) -> int:
        params = sorted((k, v) for k, v in eqn.params.items() if k not in _NO_MEANING)
        if any(len(_consts(v)) for _, value in params for v in _items(value)):
            more = (*more, object())  # equal to nothing: constants do not show in text
        formulas = (value.formula for value in ins)
        return self._number(eqn.primitive.name, str(params), *more, *formulas)

    def _constant(self, value: Any) -> _Value:
        array = np.asarray(value)
        number = self._number("value", array.dtype, array.shape, array.tobytes())
        return _Value(number, flat=not array.shape)

    def _number(self, *key: Any) -> int:
        return self._table.setdefault(key, len(self._table))


def _by(eqn: Any) -> str:
    """Which operation of which transformation it is, where JAX knows."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    names = (frame.function_name for frame in frames)
    makers = (name.partition(".")[0] for name in names if ".<locals>.update" in name)
    maker = next(makers, None)
    return f" ({eqn.primitive.name}{f' in {maker}' if maker else ''})"


def _rank(var: Any) -> int:
    return len(var.aval.shape)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _consts(value: Any) -> Sequence[Any]:
    return getattr(value, "consts", ())


def _consts_of(eqn: Any) -> Sequence[Any]:
    """The constants of an equation's one inner jaxpr."""
    found = (_consts(v) for value in eqn.params.values() for v in _items(value))
    return next((consts for consts in found if len(consts)), ())
