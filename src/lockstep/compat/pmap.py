"""`pmap`: the map over devices of old, on `jax.jit` and `jax.shard_map`."""

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import update_wrapper
from typing import Any

import jax

from lockstep.compat import nested
from lockstep.compat.options import read_options
from lockstep.compat.programs import programs_of


def pmap(
    fun: Callable[..., Any],
    axis_name: Hashable | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    global_arg_shapes: Any = None,
) -> Any:
    """Maps `fun` over the leading axis of its arguments, one row a device."""
    del global_arg_shapes
    if not callable(fun):
        raise TypeError(f"Expected a callable value, got {fun}")
    options = read_options(
        axis_name,
        in_axes,
        out_axes,
        static_broadcasted_argnums,
        donate_argnums,
        devices,
        backend,
        axis_size,
    )
    programs = programs_of(fun, options)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if nested.inside_a_map():
            return nested.call_inner(fun, options, args, kwargs)
        return programs.use(fun, operator.call, args, kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return programs.use(fun, _lower, args, kwargs)

    # All but the qualified name, by which others tell a mapped function.
    update_wrapper(mapped, fun, ("__module__", "__name__", "__doc__"))
    mapped.lower = lower
    mapped.moves = programs.moves
    return mapped


def _lower(program: Any, *call: Any) -> Any:
    return program.lower(*call)
