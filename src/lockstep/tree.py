"""Pytrees as lockstep sees them: named leaves, static leaves, first differences."""

import math
from typing import Any

import jax
import numpy as np

# What `id` tells; an audit hook makes `id` itself slow once JAX is imported.
identity = object.__hash__


def is_static(leaf: Any) -> bool:
    """Whether a leaf is part of the program (a flag, a name, a function).

    Arrays and Python numbers are data; `bool`, `str`, functions and any other
    object are static: they are never placed, and a new value means a new program.
    """
    if isinstance(leaf, bool):
        return True
    return not (isinstance(leaf, (int, float, complex)) or is_array(leaf))


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype: JAX, NumPy, torch or TensorFlow."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_gone(leaf: Any) -> bool:
    """Whether a step has taken over the memory of an array, on any device.

    What `device_get` returns on a CPU is the very memory of the first device, which can
    then not be taken over with that of the others: JAX says the array is alive.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return isinstance(leaf, jax.Array)
    shards = leaf.addressable_shards
    return bool(shards) and shards[-1].data.is_deleted()


def check_leaf_alive(leaf: Any, path: str) -> None:
    """Raise a RuntimeError for an array whose memory a step has taken over."""
    if is_gone(leaf):
        raise RuntimeError(
            f"{path} was donated to an earlier call of a step and is gone: use the "
            "state that the step returned, or wrap the step with donate_argnums=()"
        )


def named_leaves(tree: Any, name: str = "tree") -> list[tuple[str, Any]]:
    """All leaves with their paths, in flattening order.

    Example:
        >>> named_leaves({"w": 1.0, "b": [2, 3]}, "params")
        [("params['b'][0]", 2), ("params['b'][1]", 3), ("params['w']", 1.0)]
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def nbytes(tree: Any) -> int:
    """Bytes of all array leaves, each counted once whatever its replication."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if is_array(leaf)
    )


def describe_leaf(leaf: Any) -> str:
    """A leaf in a few characters: `float32[8,3]`, `weak int32[]`, `str 'adam'`.

    Example:
        >>> describe_leaf(np.zeros((8, 3), np.float32)), describe_leaf(0.5)
        ('float32[8,3]', 'weak float[]')
    """
    if is_array(leaf):
        weak = "weak " if getattr(leaf, "weak_type", False) else ""
        return f"{weak}{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    if is_static(leaf):
        return f"{type(leaf).__name__} {leaf!r}"
    return f"weak {type(leaf).__name__}[]"


def first_difference(want: Any, got: Any, name: str = "tree") -> str | None:
    """The first place where two trees differ in structure, shape or dtype.

    Weak and strong types count as equal, and values are not compared.

    Example:
        >>> first_difference({"w": np.zeros(3)}, {"w": np.zeros(4)}, "state")
        "state['w'] was float64[3] and is now float64[4]"
        >>> first_difference({"w": 1}, {"w": 1, "b": 2}, "state")
        "state['b'] is new"
    """
    old, new = dict(named_leaves(want, name)), dict(named_leaves(got, name))
    for path in old:
        if path not in new:
            return f"{path} is missing"
    for path in new:
        if path not in old:
            return f"{path} is new"
    for path, leaf in old.items():
        pair = (leaf, new[path])
        before, after = (describe_leaf(x).removeprefix("weak ") for x in pair)
        if before != after:
            return f"{path} was {before} and is now {after}"
    if jax.tree.structure(want) != jax.tree.structure(got):
        return f"{name} has the same leaves in other containers, or other static parts"
    return None


def as_host(leaf: Any) -> Any:
    """A torch or TensorFlow tensor as a NumPy array, without a copy where possible.

    Neither library is imported. What NumPy can read (a pandas column) becomes an array
    too; everything else passes through.
    """
    module = type(leaf).__module__.partition(".")[0]
    if module == "torch" and hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":  # NumPy has no bfloat16 of its own
            return leaf.float().numpy().astype(jax.numpy.bfloat16)
        return leaf.numpy()
    if module == "tensorflow" and hasattr(leaf, "numpy"):
        return np.asarray(leaf.numpy())
    if hasattr(leaf, "__array__") and not isinstance(
        leaf, (np.ndarray, np.generic, jax.Array)
    ):
        return np.asarray(leaf)
    return leaf
