"""`memory` and `largest_batch`: what a step needs, by compiling it."""

from typing import Any

import jax

from lockstep.memory import (
    LargestBatch,
    MemoryReport,
    Plan,
    examine,
    find_largest,
    plan_call,
)
from lockstep.parallel import as_parallel


def memory(
    step: Any, *args: Any, rows_axis: int | None = None, **keywords: Any
) -> MemoryReport:
    """Report the memory that one step needs on each device; the step does not run.

    The step is compiled, and so are variants of it: with `make_train_step` more
    microbatches and `remat`; for another step half the rows. What sharding would save
    is computed from the sizes of the leaves. Each choice says how it was found.

    Args:
        step: what `parallelize`, `per_device`, `make_train_step`, `compat.pmap` or
            `jax.jit` returned, or a plain step, which is parallelized.
        args: the arguments of one call: `state, batch, ...`. `jax.ShapeDtypeStruct`s
            do where there is no room for arrays.
        rows_axis: the axis of the rows; `None` is 1 for `compat.pmap`, else 0.
        keywords: the keyword arguments of the call.

    Raises:
        RuntimeError: the compiler of this backend does not tell.

    Example:
        >>> step = ls.parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        >>> report = memory(step, jnp.zeros(1024), np.ones((16, 1024), np.float32))
        >>> report.state, report.usage.reused, report.warnings
        (4096, 4096, ())
    """
    return examine(_plan(step, args, keywords, rows_axis))


def largest_batch(
    step: Any,
    state: Any,
    batch: Any,
    limit_bytes: int | None = None,
    *rest: Any,
    rows_axis: int | None = None,
    max_rows: int = 1 << 24,
) -> LargestBatch:
    """Find how many rows fit, by compiling steps with more and more rows.

    Args:
        step: as in `memory`.
        state: the first argument of the step.
        batch: any batch; its rows are taken as a pattern.
        limit_bytes: memory of one device for the step; `None` asks the device.
        rest: the further arguments of the step.
        rows_axis: the axis of the rows; `None` is 1 for `compat.pmap`, else 0.
        max_rows: where to stop when nothing grows with the rows.

    Raises:
        ValueError: even one row a device does not fit, or the device does not tell
            its limit.

    Example:
        >>> step = ls.parallelize(lambda w, x: (w - 0.1 * x.mean(0), x.sum()))
        >>> x = np.ones((16, 1024), np.float32)
        >>> largest_batch(step, jnp.zeros(1024), x, 50_000).rows % 8
        0
    """
    plan = _plan(step, (state, batch, *rest), {}, rows_axis)
    limit = _limit() if limit_bytes is None else limit_bytes
    return find_largest(plan, limit, max_rows)


def _plan(
    step: Any, args: tuple[Any, ...], keywords: dict[str, Any], rows_axis: int | None
) -> Plan:
    if not hasattr(step, "lower"):
        step = as_parallel(step)
    return plan_call(step, args, keywords, rows_axis=rows_axis)


def _limit() -> int:
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"a {device.platform} device does not tell how much memory it has: give "
            "limit_bytes"
        )
    return stats["bytes_limit"]
