"""Static leaves (flags, names, functions) through `jax.jit`, as part of the tree.

An Equinox model carries its activation function as a leaf; `jax.jit` takes arrays
only. A static leaf is wrapped in a node without leaves, so that it travels in the
tree's structure: a new value is a new structure, hence a new compile.
"""

import dataclasses
from typing import Any

import jax

from lockstep.tree import is_static


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """One static leaf; compared by value."""

    value: Any


def wrap(values: Any) -> Any:
    """The tree with every static leaf as a node without leaves.

    Example:
        >>> jax.tree.leaves(wrap({"w": 1.0, "train": True}))
        [1.0]
    """
    return jax.tree.map(lambda x: Static(x) if is_static(x) else x, values)


def unwrap(values: Any) -> Any:
    """The inverse of `wrap`."""
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        values,
        is_leaf=lambda x: isinstance(x, Static),
    )
