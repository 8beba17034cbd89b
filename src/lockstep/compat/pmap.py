"""`pmap`: the map over devices of old, on `jax.jit` and `jax.shard_map`."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, update_wrapper
from typing import Any

import jax

from lockstep.compat.mapping import nested
from lockstep.compat.mapping.alone import Alone
from lockstep.compat.mapping.options import read_options
from lockstep.compat.mapping.programs import programs_of
from lockstep.observers import explained, for_new_step, observed


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
    """Maps a function over devices: each runs it on one index of the mapped axis.

    It has the signature and the meaning of `jax.pmap`, and goes on where that stops
    today: inputs committed to other devices are moved (`.moves` counts, and the first
    time is told), a `pmap` inside a `pmap` splits one mesh along two axes, and leaves
    that cannot be split are named. The function is traced once a signature, wherever
    the arguments lie.

    In several processes each passes an axis of its own devices and gets that axis
    back, while collectives run over the devices of all.

    Args:
        fun: a function of trees; it does not see the mapped axis.
        axis_name: the name of the mapped axis, for collectives such as `lax.pmean`.
        in_axes: which axis of each positional argument is mapped, one int or a tree of
            them; `None` hands the whole argument to every device. Arguments passed by
            keyword are mapped over axis 0.
        out_axes: where the results of the devices are stacked; `None` takes a result
            that is the same on all devices.
        static_broadcasted_argnums: positions of arguments that are part of the
            program; they must be hashable.
        devices: the devices in the order of the axis, in several processes those of
            all; default the first devices of this process, or all of all processes.
        backend: the platform of the default devices.
        axis_size: the size of the axis over all processes, for a check.
        donate_argnums: positions of arguments whose memory the results may take.
        global_arg_shapes: accepted and not used; it left JAX in 2023.

    Returns:
        A function of arguments with the mapped axis. Its `.lower(*args)` gives the
        lowered program; in several processes that one takes and returns arrays of all
        processes. Its `.compiles` is the log of compiles.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: when it is called: leaves do not agree in the size of their mapped
            axis, that size does not fit the devices, a static argument has no hash,
            or `in_axes` does not fit the arguments.

    Example:
        >>> double = pmap(lambda x: 2 * x / jax.lax.psum(x, "i"), "i")
        >>> double(jax.numpy.ones(8)).tolist()
        [0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    """
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
    programs, watching = programs_of(fun, options), for_new_step()

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if nested.inside_a_map():
            return nested.call_inner(fun, options, args, kwargs)
        if watching:
            return observed(watching, mapped, call, args, kwargs)
        return call(args, kwargs)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return explained(mapped, partial(programs.use, fun, _run), args, kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return programs.use(fun, lambda run, leaves: run.lower(leaves), args, kwargs)

    # All but the qualified name, by which others tell a mapped function.
    update_wrapper(mapped, fun, ("__module__", "__name__", "__doc__"))
    mapped.lower, mapped.moves = lower, programs.records.moves
    mapped.compiles, mapped.observers = programs.records.compiles, watching
    mapped.alone = Alone(fun, options)
    return mapped


def _run(program: Any, leaves: list[Any]) -> Any:
    return program(leaves)
