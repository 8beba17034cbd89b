"""`Mean(total, count)`: the one way to average.

A mean of means is wrong as soon as the parts differ in size. So an average travels as
its two sums, over microbatches, devices, processes and batches alike, and is divided
once, where a person reads it. On the devices the sums are int32 or float32 (float64
with x64); on the host they are Python integers and floats.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """An average that can still be merged: the sum of what was seen, and how much.

    A ratio of counts is a `Mean` too. F1 is 2 tp / (2 tp + fp + fn), and stays exact
    however the rows were split:

        >>> def f1(predicted, true):
        ...     hits = jnp.sum(predicted & true)
        ...     return Mean(2 * hits, jnp.sum(predicted) + jnp.sum(true))
        >>> predicted = jnp.array([True, True, False, True])
        >>> true = jnp.array([True, False, True, True])
        >>> whole = f1(predicted, true)
        >>> parts = f1(predicted[:1], true[:1]) + f1(predicted[1:], true[1:])
        >>> float(whole) == float(parts) == 4 / 6
        True

    Attributes:
        total: the sum of the weighted values.
        count: the sum of the weights; it must not depend on parameters, for a train
            step takes no gradient through it.
    """

    total: Any
    count: Any

    @classmethod
    def of(cls, values: Any, weights: Any = None) -> "Mean":
        """The weighted mean of an array, as sums.

        Args:
            values: `[B, ...]` values; 16-bit values are summed in float32, `bool` is
                counted in int32.
            weights: masks or weights whose shape is the first axes of `values`, such
                as `[B]` or `[B, T]` for values `[B, T]`; `None` counts each value once.
                Values of weight 0 are left out, whatever they are, NaN included.

        Raises:
            ValueError: the shapes do not fit.

        Example:
            >>> Mean.of(jnp.array([1.0, 2.0, 6.0]), jnp.array([1, 1, 0])).compute()
            Array(1.5, dtype=float32)
        """
        values = jnp.asarray(values)
        if weights is None:
            return cls(jnp.sum(_summable(values)), jnp.int32(values.size))
        weights = jax.lax.stop_gradient(jnp.asarray(weights))
        if weights.shape != values.shape[: weights.ndim]:
            raise ValueError(
                f"weights of shape {weights.shape} do not fit values of shape "
                f"{values.shape}: they need its first axes, as (B,) or (B, T)"
            )
        weights = _summable(weights)
        ones = values.shape[weights.ndim :]
        spread = jnp.reshape(weights, weights.shape + (1,) * len(ones))
        # Zero times NaN is NaN: what is masked must not be multiplied but replaced.
        weighted = jnp.where(spread != 0, _summable(values) * spread, 0)
        return cls(jnp.sum(weighted), jnp.sum(weights) * int(np.prod(ones)))

    def merge(self, other: "Mean") -> "Mean":
        """The mean of both parts together; `a + b` is the same."""
        return Mean(self.total + other.total, self.count + other.count)

    def __add__(self, other: "Mean") -> "Mean":
        return self.merge(other) if isinstance(other, Mean) else NotImplemented

    def compute(self) -> Any:
        """total / count; the mean of nothing is 0, so that an empty part is no NaN."""
        if isinstance(self.count, (int, float)):
            return self.total / self.count if self.count else self.total * 1.0
        empty = jnp.asarray(self.count) == 0
        return self.total / jnp.where(empty, 1, self.count)

    def __float__(self) -> float:
        return float(_on_host(self, "mean").compute())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)


def is_mean(x: Any) -> bool:
    """Whether `x` is a `Mean`; `is_leaf=is_mean` keeps means whole in a tree."""
    return isinstance(x, Mean)


def is_value(x: Any) -> bool:
    """`is_mean`, and `None` is a leaf as well, so that no metric gets lost."""
    return x is None or is_mean(x)


def merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Add up two dicts of metrics on the host, in Python integers and float64.

    A plain number counts once, so that merging gives the mean over the dicts.

    Args:
        a: metrics of the same (nested) names as `b`.
        b: metrics; values are `Mean` or numbers.

    Returns:
        A nested dict of `Mean`, with Python numbers.

    Raises:
        ValueError: other names, or a metric that is not one number.

    Example:
        >>> first = {"loss": Mean(8.0, 4), "rate": 0.1}
        >>> second = {"loss": Mean(1.0, 1), "rate": 0.3}
        >>> compute(merge(first, second))
        {'loss': 1.8, 'rate': 0.2}
    """
    left, right = to_means(a), to_means(b)
    if jax.tree.structure(left) != jax.tree.structure(right):
        names = sorted(set(flatten(left)) ^ set(flatten(right)))
        raise ValueError(
            f"these metrics are in one of two steps only: {', '.join(names)}; a step "
            "returns the same names every time"
        )
    return jax.tree.map(Mean.merge, left, right, is_leaf=is_mean)


def compute(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Read metrics: one float a name; nested names are joined with `/`.

    Raises:
        ValueError: a metric that is not one number.

    Example:
        >>> compute({"loss": Mean(8.0, 4), "top": {"1": 0.5, "5": 0.75}})
        {'loss': 2.0, 'top/1': 0.5, 'top/5': 0.75}
    """
    return {name: float(mean) for name, mean in flatten(to_means(metrics)).items()}


def to_means(metrics: Mapping[str, Any], rows: int = 1) -> dict[str, Any]:
    """The metrics on the host as `Mean`; a plain number weighs `rows`.

    Example:
        >>> to_means({"accuracy": jnp.float32(0.5)}, rows=4)
        {'accuracy': Mean(total=2.0, count=4)}
    """

    def convert(path: tuple[Any, ...], value: Any) -> Mean:
        name = join(path)
        if isinstance(value, Mean):
            return _on_host(value, name)
        return Mean(_number(value, name) * rows, rows)

    return jax.tree_util.tree_map_with_path(convert, metrics, is_leaf=is_value)


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Nested metrics as one dict, names joined with `/`."""
    leaves = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=is_value)[0]
    return {join(path): value for path, value in leaves}


def join(path: tuple[Any, ...]) -> str:
    """The name of a metric from its path in the tree: `top/1`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _summable(values: jax.Array) -> jax.Array:
    """Values in a type whose sums do not overflow or lose counts."""
    if values.dtype == bool:
        return values.astype(jnp.int32)
    if jnp.issubdtype(values.dtype, jnp.integer):
        # An int32 sum of large integers would wrap around in silence.
        return values.astype(jnp.result_type(float))
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _on_host(mean: Mean, name: str) -> Mean:
    return Mean(_number(mean.total, name), _number(mean.count, name))


def _number(value: Any, name: str) -> int | float:
    """One Python number, exact for integers."""
    try:
        array = np.asarray(value)
    except jax.errors.TracerArrayConversionError:  # inside jit: say so
        raise
    except (TypeError, ValueError):  # keys and other things without numbers
        array = np.empty((), object)
    if array.shape == () and jnp.issubdtype(array.dtype, jnp.integer):
        return int(array)
    if array.shape == () and array.dtype.kind not in "OSUMmc":
        return float(array)
    kind = getattr(value, "dtype", type(value).__name__)
    raise ValueError(
        f"metric {name!r} is {kind} of shape {np.shape(array)}, not one number: return "
        "a scalar, or Mean(total, count) of scalars"
    )
