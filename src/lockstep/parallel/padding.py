"""Does padding leak into the results? Tried on the first padded batches.

The step runs on copies that differ only in the filling rows: as they are, with smaller
values and with larger ones, for the largest losses may be all that a step looks at. A
step that leaves the masked rows out gives the same results each time. A loss that is
averaged part by part (a shard, a microbatch) leaks only where real and filling rows
meet in one part, so the trial is repeated once there is such a batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import placement, tree
from lockstep.placement import MaskedBatch

TOLERANCE = 1e-5
_CURE = (
    ". The step must leave masked rows out: multiply by batch['mask'] and divide by "
    "its sum (over all devices), not by the number of rows; return one loss a row or "
    "Mean.of(values, mask) from the loss of make_train_step; give the mask to layers "
    "where rows meet (BatchNorm, in-batch negatives); or use remainder='drop', or "
    "in the global view 'unsplit', which is exact for any step"
)


class PaddingCheck:
    """The check for one step: `done` once a batch with a mixed part was tried."""

    def __init__(
        self, batch_argnums: tuple[int, ...], *, shards: int = 1, microbatches: int = 1
    ) -> None:
        """Watch these arguments for padded batches, computed in this many parts."""
        self.batch_argnums = batch_argnums
        self.done = False
        self._parts = shards, microbatches
        self._tried = False

    def concerns(self, placed: tuple[Any, ...]) -> bool:
        """Whether these arguments may still have to be tried."""
        return not self.done and any(
            isinstance(placed[i], MaskedBatch) for i in self.batch_argnums
        )

    def __call__(
        self,
        run: Callable[[Any], Any],
        placed: tuple[Any, ...],
        differs: Callable[[Any], str | None],
    ) -> None:
        """Try the step if this call holds padding that was not tried yet.

        Args:
            run: runs the step on placed arguments, and may donate them.
            placed: the arguments.
            differs: compares the outputs, on the host, with those of the real rows.

        Raises:
            ValueError: names the first output that depends on the filling rows.
        """
        batches = [placed[i] for i in self.batch_argnums]
        padded = [b for b in batches if isinstance(b, MaskedBatch)]
        masks = [placement.to_host(b.mask) for b in padded]
        mixed = any(self._is_mixed(mask) for mask in masks)
        is_padded = any((mask == 0).any() for mask in masks)
        if mixed or (is_padded and not self._tried):
            self._tried, self.done = True, mixed
            first = placement.to_host(run(self._copy(placed, lambda x, m: x)))
            self._try(run, placed, first, masks[0])
            if found := differs(first):
                raise ValueError(f"padding changes the results: {found}{_CURE}")

    def _is_mixed(self, mask: np.ndarray) -> bool:
        """Whether real and filling rows meet in one part of the computation."""
        shards, microbatches = self._parts
        parts = mask.reshape(shards, -1, microbatches)  # microbatches are strided
        real = (parts != 0).sum(axis=1)
        return bool(((real > 0) & (real < parts.shape[1])).any())

    def _try(
        self,
        run: Callable[[Any], Any],
        placed: tuple[Any, ...],
        first: Any,
        mask: np.ndarray,
    ) -> None:
        """Run with other filling rows, of usual size and larger."""
        _compare(first, placement.to_host(run(self._copy(placed, _refill))), mask)
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
            return  # large values may overflow, and that would raise
        larger = placement.to_host(run(self._copy(placed, _grow)))
        # Zero times infinity is NaN: what overflows in a masked row is no leak.
        if _is_finite(larger):
            _compare(first, larger, mask)

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


def _compare(first: Any, other: Any, mask: np.ndarray) -> None:
    for (path, a), (_, b) in zip(
        tree.named_leaves(first, "output"),
        tree.named_leaves(other, "output"),
        strict=True,
    ):
        if tree.is_static(a):
            continue
        gap = _relative_gap(*(_real_rows(x, mask) for x in (a, b)))
        if gap > TOLERANCE:
            raise ValueError(
                f"padding leaks into the results: {path} changes by {gap:.3g} "
                f"(relative) when only the filling rows change{_CURE}"
            )


def _is_finite(outputs: Any) -> bool:
    floats = [
        np.asarray(x).astype(np.complex128)
        for x in jax.tree.leaves(outputs)
        if tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return all(np.isfinite(x).all() for x in floats)


def _fill(batch: Any, fill: Callable[[Any, Any], Any]) -> Any:
    if not isinstance(batch, MaskedBatch):
        return batch
    mask, data = placement.to_host((batch.mask, batch.data))

    def leaf(x: Any, host: Any) -> Any:
        if not isinstance(x, jax.Array) or not x.shape or tree.is_key(x):
            return x
        return placement.put_whole(fill(host, mask), x.sharding)

    return MaskedBatch(jax.tree.map(leaf, batch.data, data), batch.mask)


def _grow(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The real rows in turn as filling rows, floats much larger."""
    real, filling = np.flatnonzero(mask), np.flatnonzero(mask == 0)
    x = x.copy()
    rows = x[real[np.arange(len(filling)) % len(real)]]
    if jnp.issubdtype(x.dtype, jnp.floating):
        factors = np.linspace(4.0, 16.0, rows[0].size).reshape(rows.shape[1:])
        with np.errstate(over="ignore"):
            rows = (rows * factors).astype(x.dtype)
    x[filling] = rows
    return x


def _refill(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Other values in the filling rows, of the same kind as the real ones.

    The real rows in turn; and since they may all be equal (one row on 8 devices), they
    are changed. Floats shrink by unequal factors, for a network that normalises its
    input does not see one common factor. Integers stay valid labels and lengths: none
    grows, and none becomes 0.
    """
    real, filling = np.flatnonzero(mask), np.flatnonzero(mask == 0)
    x = x.copy()
    rows = x[real[np.arange(len(filling)) % len(real)]]
    if np.issubdtype(x.dtype, np.floating) or x.dtype == jnp.bfloat16:
        factors = np.linspace(0.5, 1.0, rows[0].size).reshape(rows.shape[1:])
        rows = (rows * factors).astype(x.dtype)
    elif x.ndim > 1:
        rows = rows[:, ::-1]
    elif np.issubdtype(x.dtype, np.integer):
        rows = np.where(rows > 0, rows - rows // 2, rows)
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
