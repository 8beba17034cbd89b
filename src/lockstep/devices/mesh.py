"""`make_mesh`: the devices in a grid with named axes."""

# jaxlib has no type stubs, so that to pyright `jax.Device` is a variable.
# pyright: reportInvalidTypeForm=false

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(
    axes: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> Mesh:
    """Lays the devices out as a mesh with named axes.

    The axes are of type `Auto`: the compiler splits the work, and an unchanged step
    runs. (`jax.make_mesh` makes `Explicit` ones unless told otherwise.)

    Args:
        axes: the size of each axis by its name; one size may be -1, "all that is
            left". By default `{"data": -1}`.
        devices: the devices in the order to use. By default all devices of all
            processes, in the order that suits the links between them.

    Raises:
        TypeError: `axes` is no mapping, a size no int, `devices` no sequence of
            devices.
        ValueError: the sizes do not multiply to the number of devices; a size is 0 or
            below -1; two sizes are -1; a name is no identifier; a device comes twice.

    Example:
        >>> dict(make_mesh({"data": -1, "model": 2}).shape)
        {'data': 4, 'model': 2}
    """
    axes = {"data": -1} if axes is None else axes
    _check_axes(axes)
    chosen = list(jax.devices()) if devices is None else _checked(devices)
    shape = tuple(_sizes(axes, len(chosen)).values())
    types = (AxisType.Auto,) * len(shape)
    if devices is None:
        return jax.make_mesh(shape, tuple(axes), types, devices=chosen)
    grid = np.array(chosen, dtype=object).reshape(shape)
    return Mesh(grid, tuple(axes), axis_types=types)


def _check_axes(axes: Mapping[str, int]) -> None:
    if not isinstance(axes, Mapping):
        raise TypeError(
            f"axes is {axes!r}, no mapping of names to sizes such as "
            "{'data': 4, 'model': 2}"
        )
    if not axes:
        raise ValueError("axes is empty: a mesh needs an axis, such as {'data': -1}")
    for name, size in axes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"axis name {name!r}: use an identifier such as 'data'")
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"axis {name!r} has the size {size!r}: use an int")
        if size == 0 or size < -1:
            raise ValueError(
                f"axis {name!r} has the size {size}: use 1 or more, or -1 for all the "
                "devices that are left"
            )
    if list(axes.values()).count(-1) > 1:
        raise ValueError(f"axes {dict(axes)}: only one size can be -1")


def _checked(devices: Sequence[jax.Device] | np.ndarray) -> list[jax.Device]:
    if not isinstance(devices, Sequence | np.ndarray):
        raise TypeError(
            f"devices is {devices!r}: give a sequence of devices, such as "
            "jax.devices()[:4]"
        )
    chosen = list(np.array(devices, dtype=object).flat)
    if not chosen:
        raise ValueError("devices is empty: leave it out to use all devices")
    for device, count in Counter(chosen).items():
        if not isinstance(device, jax.Device):
            raise TypeError(f"devices holds {device!r}, which is no device of JAX")
        if count > 1:
            raise ValueError(
                f"devices holds {device} {count} times: a mesh uses each device once"
            )
    return chosen


def _sizes(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """The axes with -1 replaced, multiplying to `count` devices."""
    known = math.prod(int(size) for size in axes.values() if size != -1)
    if -1 in axes.values() and count % known == 0:
        return {n: count // known if s == -1 else int(s) for n, s in axes.items()}
    if known == count and -1 not in axes.values():
        return {name: int(size) for name, size in axes.items()}
    best = dict(zip(axes, _nearest(tuple(axes.values()), count), strict=True))
    need = f"{known}" if -1 not in axes.values() else f"a multiple of {known}"
    text = f"axes {dict(axes)} need {need} devices, but there are {count}: use {best}"
    if known < count:
        fewer = count - count % known if -1 in axes.values() else known
        text += f", or fewer devices: devices=jax.devices()[:{fewer}]"
    raise ValueError(text)


def _nearest(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The sizes that multiply to `count` and are, as ratios, closest to `sizes`."""

    def distance(candidate: tuple[int, ...]) -> float:
        pairs = zip(candidate, sizes, strict=True)
        return sum(abs(math.log(have / want)) for have, want in pairs if want != -1)

    return min(_factorizations(count, len(sizes)), key=distance)


def _factorizations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (count,)
        return
    for divisor in range(1, count + 1):
        if count % divisor == 0:
            for rest in _factorizations(count // divisor, parts - 1):
                yield (divisor, *rest)
