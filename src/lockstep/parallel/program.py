"""The compiled form of a step: what is donated, where outputs lie, what a state is.

One `Program` serves one structure of arguments. The user's function is traced once
per shape: an inner `jit` is asked for its output shapes first, and the outer `jit`,
which knows from them what to donate, finds the inner trace in JAX's cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep import sharding
from lockstep.compiles import CompileLog
from lockstep.parallel.layouts import Layouts
from lockstep.parallel.options import Options
from lockstep.parallel.static_leaves import Static, unwrap
from lockstep.tree import first_difference, named_leaves


@dataclasses.dataclass
class Program:
    """A step compiled for one structure of its arguments.

    Attributes:
        run: the jitted function `(*wrapped arguments) -> (wrapped outputs, token)`;
            the token is an output that stays readable after donation.
        nested: the same function for use inside a larger program, which then needs
            the `compiler_options`.
        compiler_options: what the step wants of the compiler, if anything.
        state_at: where the new state is among the outputs: "all", "first" or `None`
            (an evaluation step returns none).
        strong: leaf number in the state -> dtype, for the weakly typed leaves that
            the step returns strongly typed; placed so, the step compiles once.
        donated: the arguments whose memory is reused.
        static_outputs: whether outputs hold wrapped static leaves.
        view: what was traced, in the device view.
        layouts: how its arguments lay in the calls so far.
    """

    run: Any
    nested: Any
    compiler_options: dict[str, Any] | None
    state_at: str | None
    strong: dict[int, Any]
    donated: tuple[int, ...]
    static_outputs: bool
    view: Any = None
    layouts: Layouts = dataclasses.field(default_factory=Layouts)

    def state_of(self, outputs: Any) -> Any:
        """The new state among the outputs (`None` for an evaluation step)."""
        return _state_in(outputs, self.state_at)

    def readable(self, outputs: Any) -> jax.Array:
        """An output that no later call takes over; there is one without a token."""
        rest = outputs[1:] if self.state_at else outputs
        return next(x for x in jax.tree.leaves(rest) if isinstance(x, jax.Array))


def build(
    traced: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    names: tuple[str, ...],
    compiles: CompileLog,
) -> Program:
    """Trace a step on placed, wrapped arguments and decide donation and layout.

    Raises:
        TypeError: the step changes its state's structure, shapes or dtypes.
    """
    inner = jax.jit(traced)
    at = options.state_argnum
    out = inner.eval_shape(*args)
    state = None if at is None else jax.tree.map(_describe, args[at])
    state_at = find_state(state, out)
    strong = strong_leaves(state, _state_in(out, state_at)) if state_at else {}
    if strong and at is not None:
        args = (*args[:at], strengthen(args[at], strong), *args[at + 1 :])
        state = jax.tree.map(_describe, args[at])
        out = inner.eval_shape(*args)
    if state_at and at is not None:
        check_state(state, _state_in(out, state_at), names[at])

    def outer(*wrapped: Any) -> Any:
        compiles.begin(dict(zip(names, map(unwrap, wrapped), strict=True)))
        outputs = _keep_weak_types(state, inner(*wrapped), state_at)
        return outputs, _token(outputs, state_at)

    donated = options.donate_argnums
    if donated is None:
        donated = () if at is None or not state_at else (at,)
    layout = _layout(out, state, state_at, options.mesh)
    run, nested = _jit(outer, donated, (layout, None), options.compiler_options)
    return Program(
        run=run,
        nested=nested,
        compiler_options=options.compiler_options,
        state_at=state_at,
        strong=strong,
        donated=donated,
        static_outputs=any(
            isinstance(x, Static)
            for x in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Static))
        ),
    )


def _jit(
    fn: Any, donated: Any, layout: Any, compiler_options: dict[str, Any] | None
) -> tuple[Any, Any]:
    """The jitted function by itself, and as a part of a larger program.

    Only the outermost `jit` may have options for the compiler.
    """
    jit = functools.partial(jax.jit, fn, donate_argnums=donated, out_shardings=layout)
    nested = jit()
    run = jit(compiler_options=compiler_options) if compiler_options else nested
    return run, nested


def find_state(state: Any, out: Any) -> str | None:
    """Where the outputs hold a new version of the state: "all", "first", `None`."""
    if not jax.tree.leaves(state):
        return None
    if _similar(state, out):
        return "all"
    if isinstance(out, tuple) and out:
        tree = jax.tree.structure(state)
        nested = tree != jax.tree.structure(0)
        if _similar(state, out[0]) or (nested and tree == jax.tree.structure(out[0])):
            return "first"
    return None


def check_state(old: Any, new: Any, name: str) -> None:
    """Raise when a step would hand the next step another kind of state.

    Raises:
        TypeError: names the first leaf that differs.
    """
    difference = first_difference(old, new, name)
    if difference:
        raise TypeError(
            f"the step changes its state: {difference}. Every step must return the "
            "state it was given, with the same structure, shapes and dtypes, or the "
            "next step would be another program: cast or reshape the leaf in the step "
            "(.astype), or start from a state that has the new form"
        )


def strong_leaves(old: Any, new: Any) -> dict[int, Any]:
    """Weak leaves of the state that come back strong (or wider): number -> dtype."""
    before, after = jax.tree.leaves(old), jax.tree.leaves(new)
    if len(before) != len(after):
        return {}
    return {
        i: b.dtype
        for i, (a, b) in enumerate(zip(before, after, strict=True))
        if getattr(a, "weak_type", False) and not b.weak_type and a.shape == b.shape
    }


def strengthen(state: Any, strong: dict[int, Any]) -> Any:
    """Give the numbered weak leaves their strong dtypes, where they lie."""
    leaves, structure = jax.tree.flatten(state)
    for i, dtype in strong.items():
        leaf = leaves[i]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[i] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        elif getattr(leaf, "weak_type", False):
            leaves[i] = jax.device_put(jax.numpy.asarray(leaf, dtype), leaf.sharding)
    return jax.tree.unflatten(structure, leaves)


def _similar(state: Any, out: Any) -> bool:
    """Whether an output is meant to be the state, perhaps with a mistake in it.

    It is of the same type, at least half of all leaf paths are common to both, and
    at least half of those leaves have the same shape. A state of one bare array gives
    no such evidence, so there shape and dtype must be equal.
    """
    old, new = dict(named_leaves(state, "")), dict(named_leaves(out, ""))
    if set(old) == {""} == set(new):
        before, after = old[""], new[""]
        same_dtype = before.weak_type or before.dtype == after.dtype
        return before.shape == after.shape and same_dtype
    if type(state) is not type(out):
        return False
    common = old.keys() & new.keys()
    alike = [path for path in common if old[path].shape == new[path].shape]
    half_of_paths = 2 * len(common) >= len(old.keys() | new.keys())
    return bool(common) and half_of_paths and 2 * len(alike) >= len(common)


def _state_in(outputs: Any, state_at: str | None) -> Any:
    if state_at == "all":
        return outputs
    return outputs[0] if state_at == "first" else None


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """All about a leaf but its values, which a program must not keep alive."""
    weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak
    )


def _keep_weak_types(state: Any, outputs: Any, state_at: str | None) -> Any:
    """Make leaves strong that were strong before, so that no later step recompiles."""

    def keep(old: Any, new: Any) -> Any:
        if new.weak_type and not old.weak_type:
            return jax.lax.convert_element_type(new, new.dtype)
        return new

    if state_at == "first":
        return (jax.tree.map(keep, state, outputs[0]), *outputs[1:])
    return jax.tree.map(keep, state, outputs) if state_at == "all" else outputs


def _layout(out: Any, state: Any, state_at: str | None, mesh: Mesh) -> Any:
    """Output shardings: the state stays put, scalars are replicated, others free."""
    everywhere = sharding.replicated(mesh)

    def free(x: Any) -> Any:
        return everywhere if not x.shape else None

    keep = jax.tree.map(lambda x: x.sharding, state) if state_at else None
    if state_at == "all":
        return keep
    if state_at == "first":
        return (keep, *(jax.tree.map(free, x) for x in out[1:]))
    return jax.tree.map(free, out)


def _token(outputs: Any, state_at: str | None) -> Any:
    """An extra output to wait on, only where all outputs will be donated away."""
    others = outputs[1:] if state_at == "first" else outputs
    if state_at == "all" or not jax.tree.leaves(others):
        return jax.numpy.zeros(())
    return None
