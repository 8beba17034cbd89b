"""The state of a training run: made ready to be donated, and never changing its type.

A step compiles once if its state always has the same structure, shapes and strong
dtypes; it can reuse the state's memory if no array is in the state twice.
"""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from lockstep import tree
from lockstep.packing import unpack
from lockstep.reduce import widen
from lockstep.step.scaling import ScaleState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a train step carries from one call to the next; unused parts are `None`.

    Attributes:
        step: int32, the number of calls so far, skipped ones included.
        params: the parameters.
        opt_state: the optimizer's state; its own counts stand still on skipped steps.
        model_state: what the loss carries on, such as BatchNorm's statistics.
        key: the base key; the key of a step is `step_key(key, step)`.
        loss_scale: the dynamic loss scale.
        ema: the moving average of the parameters, in float32 or wider.
    """

    step: Any
    params: Any
    opt_state: Any
    model_state: Any = None
    key: Any = None
    loss_scale: ScaleState | None = None
    # By a factory, for a plain default is found on the class before __getattr__.
    ema: Any = dataclasses.field(default_factory=lambda: None)

    @classmethod
    def over(cls, carried: "TrainState", owner: Any) -> "TrainState":
        """The ordinary state over one with packed trees, unpacked when looked at.

        Args:
            carried: a state with packed trees.
            owner: the step that carries it on.
        """
        view = object.__new__(cls)
        packed = {name: getattr(carried, name) for name in _PACKED}
        ready = {f.name: getattr(carried, f.name) for f in dataclasses.fields(cls)}
        ready = {name: ready[name] for name in ready if name not in packed}
        vars(view).update(ready, _carried=carried, _owner=owner, _shown={})
        return view

    def carried_by(self, owner: Any) -> "TrainState | None":
        """What this state is a view over, if that step made it and nobody changed it.

        A tree that was shown is the user's, who may write into its dicts, as Optax does
        with `opt_state.hyperparams["learning_rate"] = 1e-4`. The state is then an
        ordinary one, with what was written.
        """
        if vars(self).get("_owner") is not owner or self._was_changed():
            return None
        return vars(self).get("_carried")

    def _was_changed(self) -> bool:
        """Whether a tree that was shown has other leaves, or has them elsewhere."""
        for name, (leaves, structure) in vars(self).get("_shown", {}).items():
            now, form = jax.tree.flatten(vars(self)[name])
            if form != structure or any(map(operator.is_not, now, leaves)):
                return True
        return False

    def __getattr__(self, name: str) -> Any:
        """Unpack a tree at the first look."""
        carried = vars(self).get("_carried")
        if carried is None or name not in _PACKED:
            raise AttributeError(f"TrainState has no attribute {name!r}")
        value = getattr(carried, name)
        for leaf in jax.tree.leaves(value):  # its paths are those of the vectors
            tree.check_leaf_alive(leaf, f"state.{name}")
        shown = vars(self).setdefault(name, unpack(value))
        vars(self)["_shown"].setdefault(name, jax.tree.flatten(shown))
        return shown

    def __reduce__(self) -> Any:
        """Copies and pickles are ordinary states."""
        fields = dataclasses.fields(self)
        return TrainState, tuple(getattr(self, field.name) for field in fields)

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate: `ema` in the parameters' dtypes, if it is kept.

        Example:
            >>> state = TrainState(step=0, params=jnp.zeros(2), opt_state=())
            >>> state.eval_params is state.params
            True
        """
        if self.ema is None:
            return self.params
        return jax.tree.map(lambda e, p: e.astype(p.dtype), self.ema, self.params)


_PACKED = ("params", "opt_state", "ema")


def check_params(params: Any) -> None:
    """Refuse parameters that have no gradient.

    Raises:
        TypeError: a leaf that is not a float array, with its path.
        ValueError: there are no leaves.
    """
    leaves = tree.named_leaves(params, "params")
    if not leaves:
        raise ValueError("params has no arrays: there is nothing to train")
    for path, leaf in leaves:
        leaf = tree.as_host(leaf)
        if tree.is_static(leaf) or not jnp.issubdtype(
            jnp.result_type(leaf), jnp.inexact
        ):
            raise TypeError(
                f"{path} is {tree.describe_leaf(leaf)}, which has no gradient: give "
                "the float leaves alone, with nnx.split(model, nnx.Param, ...) or "
                "eqx.partition(model, eqx.is_inexact_array), and put them together "
                "again in the loss; state that is not trained goes into model_state"
            )


def check_belongs(state: TrainState, optimizer: Any) -> None:
    """Refuse a state whose trees are of other parameters than it has.

    Raises:
        ValueError: names the first leaf of `opt_state` or `ema` that does not fit.
    """
    try:
        opt_state = jax.eval_shape(optimizer.init, state.params)
    except Exception:  # it may look at values; then its update has to complain
        opt_state = state.opt_state
    ema = state.params if state.ema is not None else None
    for name, want, what in (
        ("opt_state", opt_state, "what the optimizer keeps for"),
        ("ema", ema, "an average of"),
    ):
        if difference := _other_shapes(want, getattr(state, name), f"state.{name}"):
            raise ValueError(
                f"state.{name} is not {what} state.params: {difference}. Other "
                "parameters or another optimizer need a new state: step.init(params)"
            )


def _other_shapes(want: Any, got: Any, name: str) -> str | None:
    """The first leaf that one tree has and the other has not, or of another shape."""
    need, found = (
        {path: jnp.shape(leaf) for path, leaf in tree.named_leaves(values, name)}
        for values in (want, got)
    )
    for path in need | found:
        if path not in found:
            return f"{path} is missing"
        if path not in need:
            return f"{path} is too many"
        if need[path] != found[path]:
            return f"{path} has shape {found[path]}, not {need[path]}"
    return None


def settle(values: Any) -> Any:
    """Leaves as a step returns them: strongly typed arrays, no array twice.

    Arrays stay the caller's own where nothing has to change. An array that is met a
    second time is copied, for the same memory cannot be donated twice.

    Example:
        >>> w = jnp.ones(2)
        >>> a, b, c = settle((w, w, 0.5))
        >>> a is w, b is w, c.weak_type
        (True, False, False)
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        leaf = tree.as_host(leaf)
        if tree.is_static(leaf):
            return leaf
        if not isinstance(leaf, jax.Array):
            leaf = jnp.array(leaf)  # a copy: NumPy's memory is not ours to donate
        if getattr(leaf, "weak_type", False):  # keys have none
            leaf = leaf.astype(leaf.dtype)
        if id(leaf) in seen:
            leaf = jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, values)


def start_ema(params: Any) -> Any:
    """A moving average that begins at the parameters, as a copy of its own."""
    return jax.tree.map(lambda p: jnp.copy(widen(p)), params)


def move_ema(ema: Any, params: Any, decay: float) -> Any:
    """decay * ema + (1 - decay) * params, in the average's own dtypes.

    In bfloat16 a decay of 0.999 would be 1.0 and the average would never move.
    """

    def move(e: jax.Array, p: jax.Array) -> jax.Array:
        return e + (1 - decay) * (p.astype(e.dtype) - e)

    return jax.tree.map(move, ema, params)


def keep_types(old: Any, new: Any, name: str) -> Any:
    """The new tree with the old one's dtypes.

    Floats return to the width that they had: float32 arithmetic on a bfloat16 state is
    no reason for the state to grow. Any other change is refused.

    Raises:
        ValueError: another structure, shape or kind of number, with the leaf's path.

    Example:
        >>> keep_types(jnp.zeros((), jnp.bfloat16), jnp.float32(0.5), "scale").dtype
        dtype(bfloat16)
    """
    if jax.tree.structure(old) == jax.tree.structure(new):
        new = jax.tree.map(_as_before, old, new)
    difference = tree.first_difference(old, new, name)
    if difference is not None:
        raise ValueError(
            f"{difference}: a step must return a state of the same structure, shapes "
            "and kinds of numbers"
        )
    return new


def _as_before(old: Any, new: Any) -> Any:
    if tree.is_static(old) or tree.is_static(new):
        return new
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    before, after = jnp.result_type(old), jnp.result_type(new)
    alike = any(
        jnp.issubdtype(before, kind) and jnp.issubdtype(after, kind) for kind in kinds
    )
    return jnp.asarray(new).astype(before) if alike else new


def select(take: jax.Array, new: Any, old: Any) -> Any:
    """The new tree where `take` is true, else the old one, in one program."""

    def choose(after: Any, before: Any) -> Any:
        return before if tree.is_static(before) else jnp.where(take, after, before)

    return jax.tree.map(choose, new, old)
