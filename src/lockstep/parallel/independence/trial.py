"""The loss of the same rows in one part and in two: do they agree?

The two parts are what two devices would have, axis name included, on one device here;
or what two microbatches would, each of which takes every second row.
Only the forward pass runs. Random numbers are replaced by ones that are the same for
every row, since a row's place may not matter.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import tree
from lockstep.metrics import flatten
from lockstep.parallel.independence.parts import MICROBATCH, Parts
from lockstep.parallel.independence.steady_key import steady_key
from lockstep.parallel.options import Options
from lockstep.parallel.static_leaves import unwrap
from lockstep.placement import MaskedBatch, count_rows
from lockstep.step.outcome import evaluate_loss

_MASK_NAME = re.compile(r"mask|weight|valid", re.IGNORECASE)
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 5e-2
_TURNS = 3


class Trial:
    """The loss on the rows of two parts, at hand in this process."""

    def __init__(
        self, options: Options, parts: Parts, state: Any, batch: Any, key: Any
    ) -> None:
        """Collect what the loss needs on one device, or in the global view on all."""
        self._fn, self._mesh = options.fn, options.device_mesh
        self._parts, is_global = parts, parts.axis is None
        shards = parts.count
        if is_global:  # no more rows than a device has
            shards *= self._mesh.shape[options.row_axis]
        self._rows = 2 * max(count_rows(batch) // shards, 1)
        self._twins = is_global and self._fn.loss.model_state
        self._key = None if key is None else steady_key()
        alone = not is_global or jax.process_count() > 1
        keep = _one_copy if alone else lambda x: x  # which may be split over the mesh
        self._state = jax.tree.map(keep, (state.params, state.model_state))
        self._batch = jax.tree.map(lambda x: _first_rows(x, self._rows, keep), batch)
        self._tolerance = _tolerance(self._state)

    def gaps(self) -> dict[str, tuple[float, float]]:
        """What differs, by name: its value in one part and in two.

        Empty where the loss cannot be tried or is not finite.
        """
        if not all(map(_is_at_hand, jax.tree.leaves(self._state))):
            return {}
        both = jax.jit(lambda *args: (self._means(1, *args), self._means(2, *args)))
        found: list[dict[str, tuple[float, float]]] = []
        try:
            with jax.default_matmul_precision("highest"):
                for turn in range(_TURNS):
                    batch = self._other_rows(turn)
                    whole, parts = both(*self._other_parameters(turn), batch)
                    found.append(self._differing(whole, parts))
        except Exception:  # whatever a user's loss may raise out of its step
            return {}
        # One disagreement may be a tie broken otherwise, one agreement an accident.
        counts = Counter(name for turn in found for name in turn)
        return {
            name: pair
            for turn in found
            for name, pair in turn.items()
            if counts[name] > 1
        }

    def _means(self, parts: int, params: Any, model_state: Any, batch: Any) -> Any:
        """Loss and metrics of the rows in so many parts, each as `[parts + 1]`.

        The last value is that of all parts together.
        """
        leaves, structure = jax.tree.flatten(batch)
        axes = [0 if x.shape else None for x in leaves]

        def alone(*leaves: Any) -> Any:
            batch = jax.tree.unflatten(structure, leaves)
            params_, state_, batch_ = unwrap((params, model_state, batch))
            _, outcome = evaluate_loss(
                self._fn.loss,
                params_,
                state_,
                batch_,
                self._key,
                mask_name=self._fn.mask,
                parts=True,
            )
            return {"loss": outcome.loss, "metrics": outcome.metrics}

        one: Callable[..., Any] = alone
        if self._parts.axis is None:
            one = jax.vmap(one, axes, axis_size=parts)
        for name in self._mesh.axis_names if self._parts.axis else ():
            if name == self._parts.axis:
                one = jax.vmap(one, axes, axis_name=name, axis_size=parts)
            else:  # the loss may name it
                one = _alone_on(name, one)
        cut = [self._cut(x, parts) if x.shape else x for x in leaves]
        each = jax.tree.map(lambda x: jnp.append(x, jnp.sum(x)), one(*cut))
        return {
            name: mean.compute()
            for name, mean in {"loss": each["loss"], **flatten(each["metrics"])}.items()
        }

    def _cut(self, leaf: Any, parts: int) -> jax.Array:
        """The rows of each part: blocks, or as microbatches take them."""
        size, shape = self._rows // parts, leaf.shape[1:]
        if self._parts.name != MICROBATCH:
            return jnp.reshape(leaf, (parts, size, *shape))
        return jnp.moveaxis(jnp.reshape(leaf, (size, parts, *shape)), 1, 0)

    def _other_parameters(self, turn: int) -> Any:
        """The parameters, moved: a layer that starts at 0 makes all rows alike."""
        params, model_state = self._state

        def move(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            steps = jnp.sin(jnp.arange(1, x.size + 1) * (turn + 1))
            return (x + 0.1 * steps.reshape(x.shape)).astype(x.dtype)

        return jax.tree.map(move, params), model_state

    def _other_rows(self, turn: int) -> Any:
        """The rows, each with floats of another size; a mask leaves the last one out.

        One of tokens leaves some of each row out. Rows that are all alike, or all
        count, would not show that they meet. In the global view of a loss with
        statistics each row comes twice, once for either part: BatchNorm normalises a
        microbatch by itself, which is known and meant, and no gap.
        """
        factors = np.random.default_rng(turn).uniform(0.5, 2.0, self._rows)
        if turn == 0:
            factors.sort()

        def change(path: Any, x: Any) -> Any:
            if tree.is_key(x) or not x.shape:
                return x
            if jnp.issubdtype(x.dtype, jnp.floating):
                spread = np.reshape(factors, (-1,) + (1,) * (x.ndim - 1))
                x = (x * spread).astype(x.dtype)
            named = _MASK_NAME.search(jax.tree_util.keystr(path))
            if len(x) > 2 and (named or (x == 1).all()):
                x = np.where(_counting(x.shape), x, 0).astype(x.dtype)
            return x

        def double(x: Any) -> Any:
            return x[np.arange(self._rows) // 2] if x.shape else x

        batch = self._batch
        changed = jax.tree_util.tree_map_with_path(change, batch)
        if self._twins:
            changed = jax.tree.map(double, changed)
        if not isinstance(batch, MaskedBatch):
            return changed
        # Whether padding leaks is for the first padded batch to show.
        return MaskedBatch(changed.data, np.ones_like(batch.mask))

    def _differing(self, whole: Any, parts: Any) -> dict[str, tuple[float, float]]:
        found = {}
        for name in whole:
            one = float(whole[name][-1])
            *each, two = np.asarray(parts[name], np.float64)
            if not np.isfinite(one):
                continue
            size = np.abs([x for x in (one, two, *each) if np.isfinite(x)]).max()
            if not abs(one - two) <= self._tolerance * size:  # or NaN, as of 0 / 0
                found[name] = one, float(two)
        return found


def _alone_on(name: str, one: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a further axis of one device."""

    def run(*leaves: Any) -> Any:
        axes = tuple(None for _ in leaves)
        out = jax.vmap(one, axes, axis_name=name, axis_size=1)(*leaves)
        return jax.tree.map(lambda x: x[0], out)

    return run


def _one_copy(leaf: Any) -> Any:
    """A replicated leaf as one array of one device, without a copy."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return leaf


def _is_at_hand(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _first_rows(leaf: Any, rows: int, keep: Callable[[Any], Any]) -> Any:
    """Rows that lie on this process's devices, repeated where there are too few."""
    if not isinstance(leaf, jax.Array) or not leaf.shape:
        return keep(leaf)
    shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
    words = tree.is_key(leaf)
    found: list[np.ndarray] = []
    for start in sorted(shards):
        data = shards[start]
        found.append(np.asarray(jax.random.key_data(data) if words else data))
        if sum(map(len, found)) >= rows:
            break
    joined = np.concatenate(found)
    taken: Any = joined[np.arange(rows) % len(joined)]
    return (
        jax.random.wrap_key_data(taken, impl=jax.random.key_impl(leaf))
        if words
        else taken
    )


def _counting(shape: tuple[int, ...]) -> np.ndarray:
    """Which entries of a mask count: all rows but the last, or other shares of each.

    The first entry of each row stays, for a softmax of nothing is no number.
    """
    if len(shape) == 1:
        return np.arange(shape[0]) < shape[0] - 1
    shares = np.linspace(0.3, 0.9, shape[0]).reshape(-1, *(1 for _ in shape[1:]))
    kept = np.random.default_rng(0).uniform(size=shape) < shares
    kept[..., 0] = True
    return kept


def _tolerance(state: Any) -> float:
    floats = [
        x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return _TOLERANCE_16_BIT if min(floats, default=4) < 4 else _TOLERANCE
