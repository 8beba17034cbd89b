"""Does padding leak into the results? Tried once, on the first padded batch.

The step runs twice on copies that differ only in the filling rows. A step that leaves
the masked rows out gives the same results twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import placement, tree
from lockstep.placement import MaskedBatch

TOLERANCE = 1e-5


class PaddingCheck:
    """The check for one step: `done` once a padded batch was tried."""

    def __init__(self, batch_argnums: tuple[int, ...]) -> None:
        """Watch these arguments for padded batches."""
        self.batch_argnums = batch_argnums
        self.done = False

    def __call__(self, run: Callable[[Any], Any], placed: tuple[Any, ...]) -> None:
        """Try the step if this call holds padding.

        Raises:
            ValueError: names the first output that depends on the filling rows.
        """
        batches = [placed[i] for i in self.batch_argnums]
        masks = [np.asarray(b.mask) for b in batches if isinstance(b, MaskedBatch)]
        if not any((mask == 0).any() for mask in masks):
            return
        self.done = True
        first = placement.to_host(run(self._copy(placed, lambda x, m: x)))
        other = placement.to_host(run(self._copy(placed, _refill)))
        for (path, a), (_, b) in zip(
            tree.named_leaves(first, "output"),
            tree.named_leaves(other, "output"),
            strict=True,
        ):
            if tree.is_static(a):
                continue
            gap = _relative_gap(*(_real_rows(x, masks[0]) for x in (a, b)))
            if gap > TOLERANCE:
                raise ValueError(
                    f"padding leaks into the results: {path} changes by {gap:.3g} "
                    "(relative) when only the filling rows change. The step must leave "
                    "masked rows out: multiply by batch['mask'] and divide by its sum, "
                    "return one loss a row or Mean.of(values, mask) from the loss of "
                    "make_train_step, or give the mask to layers where rows meet "
                    "(BatchNorm, in-batch negatives); or use remainder='drop', or "
                    "'unsplit', which is exact for any step"
                )

    def _copy(
        self, placed: tuple[Any, ...], fill: Callable[[Any, Any], Any]
    ) -> tuple[Any, ...]:
        """Copies of all arguments (the step may donate), batches filled anew."""
        copies = jax.tree.map(
            lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, placed
        )
        return tuple(
            _fill(arg, fill) if i in self.batch_argnums else arg
            for i, arg in enumerate(copies)
        )


def _fill(batch: Any, fill: Callable[[Any, Any], Any]) -> Any:
    if not isinstance(batch, MaskedBatch):
        return batch
    mask = np.asarray(batch.mask)

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not x.shape or tree.is_key(x):
            return x
        return jax.device_put(fill(np.asarray(x), mask), x.sharding)

    return MaskedBatch(jax.tree.map(leaf, batch.data), batch.mask)


def _refill(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Other values in the filling rows, of the same kind as the real ones.

    The real rows in turn; and since they may all be equal (one row on 8 devices),
    float values are also halved and longer rows reversed.
    """
    real, filling = np.flatnonzero(mask), np.flatnonzero(mask == 0)
    x = x.copy()
    rows = x[real[np.arange(len(filling)) % len(real)]]
    if np.issubdtype(x.dtype, np.floating) or x.dtype == jnp.bfloat16:
        rows = (rows * np.asarray(0.5, x.dtype)).astype(x.dtype)
    elif x.ndim > 1:
        rows = rows[:, ::-1]
    x[filling] = rows
    return x


def _real_rows(x: Any, mask: np.ndarray) -> Any:
    """What an output with one value a row says of the real rows; others whole."""
    if tree.is_key(x):
        return x
    if np.ndim(x) > 1 and np.shape(x)[0] * np.shape(x)[1] == len(mask):
        x = np.reshape(x, (len(mask), *np.shape(x)[2:]))  # stacked by devices
    return x[mask != 0] if np.shape(x)[:1] == mask.shape else x


def _relative_gap(a: Any, b: Any) -> float:
    """2-norm of the difference over the 2-norm; 0 where both are equal (NaN too)."""
    if tree.is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = (np.asarray(x).astype(np.complex128) for x in (a, b))
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    gap = float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))
    return gap if np.isfinite(gap) else np.inf
