"""Running a `pmap` on any number of rows: pad, split, run, join, cut."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jax
import numpy as np

from lockstep.placement import count_rows


def pad_shard_unpad(
    wrapped: Callable[..., Any],
    static_argnums: Iterable[int] = (0,),
    static_argnames: Iterable[str] = (),
    static_return: bool = False,
) -> Callable[..., Any]:
    """Calls a mapped function with rows that do not divide by the devices.

    Rows of zeros fill the batch up, as Flax did it: a mask that travels with the batch
    is then zero for them. The rows of the results that belong to them are cut off.

    Args:
        wrapped: takes and returns stacked trees, such as a `pmap`.
        static_argnums: positions of arguments that are passed on as they are; by
            default the first, the parameters.
        static_argnames: keyword arguments that are passed on as they are.
        static_return: whether the results have no rows, such as sums over the batch;
            they are then returned as they are.

    Returns:
        A function of trees `[B, ...]` that returns NumPy trees `[B, ...]`. It takes one
        argument more, `min_device_batch`: the fewest rows a device gets, so that short
        batches do not compile again.

    Raises:
        ValueError: two leaves have different numbers of rows, when it is called.

    Example:
        >>> from lockstep.compat import pmap
        >>> double = pad_shard_unpad(pmap(lambda x: 2 * x), static_argnums=())
        >>> double(np.arange(11.0))[-2:].tolist()
        [18.0, 20.0]
    """
    static_argnums, static_argnames = set(static_argnums), set(static_argnames)

    @wraps(wrapped)
    def on_any_rows(
        *args: Any, min_device_batch: int | None = None, **kwargs: Any
    ) -> Any:
        batches = [a for i, a in enumerate(args) if i not in static_argnums]
        named = {k: v for k, v in kwargs.items() if k not in static_argnames}
        rows, devices = count_rows((batches, named)), jax.local_device_count()
        each = max(-(-rows // devices), min_device_batch or 0)

        def pad(x: Any) -> np.ndarray:
            x = np.asarray(x)
            filling = np.zeros((devices * each - rows, *x.shape[1:]), x.dtype)
            return np.concatenate([x, filling]).reshape(devices, each, *x.shape[1:])

        def unpad(x: Any) -> np.ndarray:
            x = jax.device_get(x)  # first, for each length cut there would compile anew
            return x.reshape(-1, *x.shape[2:])[:rows]

        padded = iter(jax.tree.map(pad, batches))
        args = tuple(
            a if i in static_argnums else next(padded) for i, a in enumerate(args)
        )
        out = wrapped(*args, **kwargs | jax.tree.map(pad, named))
        return out if static_return else jax.tree.map(unpad, out)

    return on_any_rows
