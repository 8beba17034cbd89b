"""A state as it is written: plain arrays by path, and a list of what they were.

The list knows what an array file does not: which arrays are typed keys, which are
weakly typed, which leaves are static, and which containers hold nothing. Two states
fit if their lists do, whatever classes their containers are made of.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import tree

_NAME = "state"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of one leaf without its value.

    Attributes:
        form: `float32[3]`, `key<fry>[]`, `str 'adam'`, `EmptyState` (holds nothing).
        shape: of an array or of keys; `None` for what is not written.
        weak: whether it is a Python number, or an array made from one.
        impl: the name of the kind of typed keys, where it is known.
    """

    form: str
    shape: tuple[int, ...] | None = None
    weak: bool = False
    impl: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        shape = None if self.shape is None else list(self.shape)
        return dataclasses.asdict(self) | {"shape": shape}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Leaf":
        """The inverse of `to_json`."""
        shape = fields["shape"]
        return dataclasses.replace(
            cls(**fields), shape=None if shape is None else tuple(shape)
        )


def describe(state: Any) -> dict[str, Leaf]:
    """All leaves and all empty containers of a state, by path.

    Raises:
        ValueError: two leaves have the same path.

    Example:
        >>> describe({"w": jnp.zeros(3), "b": None})["state['b']"].form
        'NoneType'
    """
    flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=_holds_nothing)[0]
    found: dict[str, Leaf] = {}
    for keys, leaf in flat:
        path = _NAME + jax.tree_util.keystr(keys)
        if path in found:
            raise ValueError(
                f"the state has two leaves {path}, and a checkpoint keeps leaves by "
                "their path: give the class of that container other keys"
            )
        found[path] = _describe(leaf)
    return found


def arrays_of(state: Any) -> dict[str, Any]:
    """What is written: every array by path, typed keys as their data."""
    named = dict(tree.named_leaves(state, _NAME))
    return {path: _written(leaf) for path, leaf in named.items() if _is_written(leaf)}


def put_back(state: Any, arrays: dict[str, Any], saved: dict[str, Leaf]) -> Any:
    """The tree of `state` with the arrays that were read, as its own kinds of leaves.

    Instead of arrays `state` may hold descriptions (`jax.ShapeDtypeStruct`). Static
    leaves stay as they are.
    """
    leaves, structure = jax.tree.flatten(state)
    paths = [path for path, _ in tree.named_leaves(state, _NAME)]
    new = []
    for path, leaf in zip(paths, leaves, strict=True):
        if path in arrays:
            leaf = _as_leaf(leaf, arrays[path], saved[path])
        elif isinstance(leaf, jax.ShapeDtypeStruct):  # an array without size
            leaf = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        new.append(leaf)
    return jax.tree.unflatten(structure, new)


def differences(saved: dict[str, Leaf], wanted: dict[str, Leaf]) -> list[str]:
    """Each place where a saved state does not fit, in words.

    Example:
        >>> differences({"state": Leaf("float32[3]", (3,))}, {"state": Leaf("str 'a'")})
        ["state is saved as float32[3], and this run has str 'a'"]
    """
    found = []
    for path in {**saved, **wanted}:
        old, new = saved.get(path), wanted.get(path)
        if old is None and new is not None:
            found.append(f"{path} ({new.form}) is not in the checkpoint")
        elif new is None and old is not None:
            found.append(f"{path} ({old.form}) is only in the checkpoint")
        elif old and new and not _fits(old, new):
            found.append(f"{path} is saved as {old.form}, and this run has {new.form}")
    return found


def _fits(saved: Leaf, wanted: Leaf) -> bool:
    """The same form; a Python number may have become an array of its kind."""
    if saved.form == wanted.form:
        return True
    if not wanted.weak or saved.shape != wanted.shape:
        return False
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    types = [jnp.dtype(leaf.form.partition("[")[0]) for leaf in (saved, wanted)]
    return any(all(jnp.issubdtype(t, kind) for t in types) for kind in kinds)


def _describe(leaf: Any) -> Leaf:
    if _holds_nothing(leaf):
        return Leaf(type(leaf).__name__)
    leaf = tree.as_host(leaf)
    if tree.is_key(leaf):
        known = isinstance(leaf, jax.Array)  # a description does not know
        impl = str(jax.random.key_impl(leaf)) if known else None
        return Leaf(tree.describe_leaf(leaf), leaf.shape, impl=impl)
    if tree.is_static(leaf):
        plain = isinstance(leaf, (bool, str, bytes))
        return Leaf(tree.describe_leaf(leaf) if plain else _name_of(leaf))
    shaped = jax.eval_shape(lambda: jnp.asarray(leaf)) if np.isscalar(leaf) else leaf
    weak = bool(getattr(shaped, "weak_type", False))
    form = tree.describe_leaf(shaped).removeprefix("weak ")
    return Leaf(form, tuple(shaped.shape), weak)


def _name_of(static: Any) -> str:
    name = getattr(static, "__qualname__", None) or getattr(static, "__name__", "")
    return f"{type(static).__name__} {name}".rstrip()


def _holds_nothing(node: Any) -> bool:
    return jax.tree.structure(node).num_leaves == 0


def _is_written(leaf: Any) -> bool:
    """Orbax refuses arrays of no size, and there is nothing to write."""
    leaf = tree.as_host(leaf)
    return not tree.is_static(leaf) and math.prod(np.shape(leaf)) > 0


def _written(leaf: Any) -> Any:
    leaf = tree.as_host(leaf)
    if tree.is_key(leaf):
        return _key_data(leaf)
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        return leaf
    return np.asarray(jnp.asarray(leaf))


def _key_data(key: Any) -> Any:
    """The words of typed keys, or of a description of such."""
    if isinstance(key, jax.Array):
        return jax.random.key_data(key)
    words = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)


def _as_leaf(old: Any, array: Any, saved: Leaf) -> Any:
    """A read array as the kind of leaf that stands in the state."""
    if saved.impl:
        return jax.random.wrap_key_data(array, impl=saved.impl)
    if isinstance(old, (jax.Array, jax.ShapeDtypeStruct)):
        weak = saved.weak and getattr(old, "weak_type", False)
        return _weak_at(array.sharding)(array) if weak else array
    return type(old)(array.item()) if isinstance(old, (int, float, complex)) else array


@functools.cache
def _weak_at(where: Any) -> Any:
    """A function that makes an array weakly typed, as Python numbers are."""

    def weaken(array: jax.Array) -> jax.Array:
        number = {"f": 0.0, "c": 0j}.get(array.dtype.kind, 0)
        return jnp.full(array.shape, number).at[...].set(array)

    return jax.jit(weaken, out_shardings=where)
