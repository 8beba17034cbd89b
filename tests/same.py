"""What "the same training" means, as one assertion.

A leaf is the same when the 2-norm of the difference is within `tol` of the 2-norm
of what was wanted. A leaf without signal is left out: a convolution's bias before
BatchNorm has a true gradient of zero and wanders by rounding alone.
"""

from typing import Any

import jax
import numpy as np

NO_SIGNAL = 1e-6  # of the largest gradient norm of any leaf


def assert_same(got: Any, want: Any, tol: float = 1e-6, *, grads: Any = None) -> None:
    """Fails with the path of the first leaf of `got` that differs from `want`.

    Args:
        got: a tree of arrays or numbers.
        want: a tree of the same structure, shapes and dtypes.
        tol: the greatest relative difference per leaf, in 2-norm.
        grads: gradients at `want`, of the same structure; leaves whose gradient has
            no signal are not compared.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    silent = _without_signal(grads) if grads is not None else set()
    pairs = zip(_leaves(got), _leaves(want), strict=True)
    for (path, left), (_, right) in pairs:
        assert left.shape == right.shape, f"{path}: {left.shape} != {right.shape}"
        assert left.dtype == right.dtype, f"{path}: {left.dtype} != {right.dtype}"
        if path in silent:
            continue
        off = relative_difference(left, right)
        assert off <= tol, f"{path}: relative difference {off:.3e} is above {tol:.0e}"


def relative_difference(got: Any, want: Any) -> float:
    """The 2-norm of `got - want` over that of `want`; inf where one is not finite."""
    left = np.asarray(got, np.float64)
    right = np.asarray(want, np.float64)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return 0.0 if np.array_equal(left, right, equal_nan=True) else float("inf")
    difference = float(np.linalg.norm(left - right))
    return difference / (float(np.linalg.norm(right)) or 1.0)


def _leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), _on_host(leaf)) for path, leaf in leaves]


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _without_signal(grads: Any) -> set[str]:
    norms = {path: np.linalg.norm(np.ravel(leaf)) for path, leaf in _leaves(grads)}
    largest = max(norms.values(), default=0.0)
    return {path for path, norm in norms.items() if norm <= NO_SIGNAL * largest}
