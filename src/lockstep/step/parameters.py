"""Which leaves of any training state are its parameters."""

from typing import Any

import jax

from lockstep.tree import is_array


def parameter_paths(state: Any, name: str = "state") -> set[str]:
    """The leaves that are trained: no counters, no moments of an optimizer.

    What lies under `params` is, if there is such a name; else every float leaf that
    is not part of an optax state.

    Example:
        >>> import optax
        >>> params = {"w": 1.0}
        >>> parameter_paths((params, optax.adam(1e-3).init(params), 7))
        {"state[0]['w']"}
    """

    def is_optax(node: Any) -> bool:
        return type(node).__module__.partition(".")[0] == "optax"

    flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_optax)[0]
    floats = [
        (path, name + jax.tree_util.keystr(path))
        for path, leaf in flat
        if not is_optax(leaf) and _is_float(leaf)
    ]
    under = [text for path, text in floats if any(map(_is_params, path))]
    return set(under or [text for _, text in floats])


def _is_params(entry: Any) -> bool:
    name = getattr(entry, "name", getattr(entry, "key", None))
    return name == "params"


def _is_float(leaf: Any) -> bool:
    if is_array(leaf):
        return jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    return isinstance(leaf, (float, complex))
