"""Means over an interval of steps, read when it costs nothing to read them.

Reading a metric of the newest step would make the host wait for the devices, and the
devices then for the host. A step keeps two calls in flight, so the metrics of a step
are there as soon as two more were handed over. Until then they stay on the devices.
A call is one step, or several under `Trainer(steps_per_call=k)`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lockstep.loop import StepInfo
from lockstep.metrics import compute, is_mean, join
from lockstep.parallel.run_ahead import MAX_IN_FLIGHT

MOST_HELD = 256


class Interval:
    """The metrics of the steps since the last `end`, and of ended ones not yet read.

    A plain number is averaged over the rows, a `Mean` is merged; both on the host in
    float64. At most `MOST_HELD` steps stay on the devices: of a longer interval the
    finished steps are read earlier.
    """

    def __init__(self) -> None:
        self._growing = _Steps()
        self._ended: deque[tuple[int, _Steps]] = deque()
        self._calls = 0

    def add(self, info: StepInfo) -> None:
        """Take the metrics of one more step, without a look at their values.

        Raises:
            ValueError: at the first step, a metric that is not one number.
        """
        if not self._calls:
            check_scalars(info.metrics)
        self._calls += info.step == info.call[0]
        self._growing.add(info)

    def end(self) -> None:
        """The interval ends with the newest step, and the next one begins."""
        if self._growing.last_step:
            self._growing.start_copy()
            self._ended.append((self._calls, self._growing))
            self._growing = _Steps()

    def ready(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Take the intervals whose steps are done: their last step and their means."""
        while self._ended and self._ended[0][0] <= self._calls - MAX_IN_FLIGHT:
            _, steps = self._ended.popleft()
            yield steps.last_step, steps.means()

    def rest(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Take all that is left, up to the newest step; waits for the devices."""
        self.end()
        while self._ended:
            _, steps = self._ended.popleft()
            yield steps.last_step, steps.means()


class _Steps:
    """The metrics of some steps: newest ones on the devices, older ones as sums."""

    def __init__(self) -> None:
        self.last_step = 0
        self._structure: Any = None
        self._held: list[list[Any]] = []
        self._rows: list[int] = []
        self._sums: list[np.ndarray] = []
        self._seconds = 0.0
        self._timed_steps = self._timed_rows = 0

    def add(self, info: StepInfo) -> None:
        leaves, structure = jax.tree.flatten(info.metrics)
        if self._structure is not None and structure != self._structure:
            raise ValueError(
                f"the metrics changed from {self._structure} to {structure}: a step "
                "returns the same names every time"
            )
        self._structure = structure
        self.last_step = info.step
        self._held.append(leaves)
        self._rows.append(info.rows)
        if not info.compiled:  # the time of a compile says nothing about the speed
            self._seconds += info.seconds
            self._timed_steps += 1
            self._timed_rows += info.rows
        if len(self._held) > MOST_HELD:
            self._read(keep=MAX_IN_FLIGHT * len(info.call))

    def start_copy(self) -> None:
        for leaves in self._held:
            for leaf in leaves:
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()

    def means(self) -> dict[str, float]:
        """The means, the loss first, and the speed where it was measured."""
        self._read()
        sums, by_rows = np.sum(self._sums, axis=0).tolist()
        rows = sum(self._rows)
        totals = jax.tree.unflatten(self._structure, sums)
        averages = jax.tree.unflatten(self._structure, [x / rows for x in by_rows])
        merged = jax.tree.map(
            lambda total, average: total if is_mean(total) else average,
            totals,
            averages,
            is_leaf=is_mean,
        )
        means = compute(merged)
        first = {"loss": means["loss"]} if "loss" in means else {}
        return first | means | self._speed()

    def _read(self, keep: int = 0) -> None:
        """Sum up all steps but the newest `keep`: plainly, and weighted by rows."""
        count = len(self._held) - keep
        if count <= 0:
            return
        done, self._held = self._held[:count], self._held[count:]
        values = np.array(jax.device_get(done), np.float64)
        first = len(self._rows) - keep - count
        rows = np.array(self._rows[first : first + count], np.float64)
        self._sums.append(np.stack([values.sum(0), rows @ values]))

    def _speed(self) -> dict[str, float]:
        if not self._seconds:
            return {}
        return {
            "examples_per_second": self._timed_rows / self._seconds,
            "seconds_per_step": self._seconds / self._timed_steps,
        }


def check_scalars(metrics: Any) -> None:
    """Refuse a metric that is not one number, by its shape and type alone.

    Raises:
        ValueError: a metric with the name and the shape that it has.

    Example:
        >>> check_scalars({"loss": jax.numpy.float32(0.5)})
    """
    leaves = jax.tree_util.tree_flatten_with_path(
        metrics, is_leaf=lambda x: x is None or is_mean(x)
    )[0]
    for path, value in leaves:
        for part in (value.total, value.count) if is_mean(value) else (value,):
            dtype = getattr(part, "dtype", None) or np.asarray(part).dtype
            if np.shape(part) or not _is_real(dtype):
                text = getattr(dtype, "kind", "") in tuple("OUS")  # keys have no kind
                kind = type(part).__name__ if text else dtype
                raise ValueError(
                    f"metric {join(path)!r} is {kind} of shape {np.shape(part)}, not "
                    "one number: return its mean, or Mean.of(values), or leave it out "
                    "of the metrics"
                )


def _is_real(dtype: Any) -> bool:
    kinds = (np.bool_, np.integer, np.floating)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)
