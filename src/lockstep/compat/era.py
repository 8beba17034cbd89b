"""What some names of the pmap era meant, where an alias would not say it.

`install` puts these in place; new code has no use for them.
"""
# jaxlib has no type stubs, so that to pyright `jax.Device` is a variable.
# pyright: reportInvalidTypeForm=false

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# --- what pmap returned ---------------------------------------------------------


class _StackedLayout(type):
    def __instancecheck__(cls, sharding: object) -> bool:
        if not isinstance(sharding, NamedSharding) or not sharding.spec:
            return False
        axes = sharding.mesh.axis_names
        first, *others = sharding.spec
        split = first if isinstance(first, tuple) else (first,)
        return tuple(split) == tuple(axes) and not any(others)


class PmapSharding(metaclass=_StackedLayout):
    """The layout of what `pmap` returns: one row of axis 0 a device.

    True in `isinstance` for today's sharding of the same layout.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "PmapSharding":
        """Refuses to build the sharding that JAX no longer has."""
        raise TypeError(
            "jax.sharding.PmapSharding can only be tested against: build a "
            "jax.sharding.NamedSharding(Mesh(devices, 'data'), PartitionSpec('data'))"
        )

    @classmethod
    def default(
        cls,
        shape: Sequence[int],
        sharded_dim: int = 0,
        devices: Sequence[jax.Device] | None = None,
    ) -> NamedSharding:
        """The layout with one index of `sharded_dim` on each device."""
        devices = jax.local_devices() if devices is None else devices
        size = shape[sharded_dim]
        if size > len(devices):
            raise ValueError(
                f"axis {sharded_dim} of {tuple(shape)} has {size} rows for "
                f"{len(devices)} devices: pass one row a device"
            )
        spec = PartitionSpec(*[None] * sharded_dim, "devices")
        return NamedSharding(Mesh(np.asarray(devices[:size]), "devices"), spec)


class _StackedArray(type):
    def __instancecheck__(cls, array: object) -> bool:
        return isinstance(array, jax.Array) and isinstance(array.sharding, PmapSharding)


class ShardedDeviceArray(metaclass=_StackedArray):
    """The array type that `pmap` returned: an array laid out one row a device."""


class DeviceBuffer:
    """One device's row of an array; its device is asked for by a call.

    Behaves otherwise as the array it holds.
    """

    def __init__(self, array: jax.Array, device: jax.Device):
        self._array = array
        self._device = device

    def device(self) -> jax.Device:
        """Where the row lies."""
        return self._device

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._array, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


def _buffers(array: jax.Array) -> list[DeviceBuffer]:
    stacked = isinstance(array.sharding, PmapSharding)
    return [
        DeviceBuffer(shard.data[0] if stacked else shard.data, shard.device)
        for shard in array.addressable_shards
    ]


device_buffers = property(_buffers, doc="Each device's part, in pmap's order.")
device_buffer = property(lambda x: _buffers(x)[0], doc="The first device's part.")


def _number_of(convert: Callable[[Any], Any]) -> Callable[[jax.Array], Any]:
    def of(array: jax.Array) -> Any:
        if array.size != 1:
            raise TypeError(f"only an array of one element is a number, not {array}")
        return convert(array.item())

    return of


# An array of one element was a number whatever its shape: `float(losses[:1])`.
to_float, to_int, to_complex = map(_number_of, (float, int, complex))


def pmean(tree: Any, axis_name: str = "batch") -> Any:
    """Averages over the devices, along the axis that Flax's examples named."""
    return jax.lax.pmean(tree, axis_name)


# --- functions whose spelling changed ------------------------------------------


def clip(
    arr: Any = None,
    min: Any = None,
    max: Any = None,
    *,
    a: Any = None,
    a_min: Any = None,
    a_max: Any = None,
    out: None = None,
) -> jax.Array:
    """`jnp.clip` with today's names, and with those it took from NumPy."""
    if out is not None:
        raise NotImplementedError("jnp.clip has no `out`: it returns a new array")
    return _clip(
        a if arr is None else arr,
        a_min if min is None else min,
        a_max if max is None else max,
    )


_clip = jnp.clip  # the one that `install` replaces


_UNSAID: Any = object()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from jax.experimental.pjit import pjit as _pjit
    except ImportError:  # it is on its way out; jax.jit knows no `with mesh:`
        _pjit = jax.jit


def pjit(
    fun: Callable[..., Any],
    in_axis_resources: Any = _UNSAID,
    out_axis_resources: Any = _UNSAID,
    static_argnums: Any = None,
    donate_argnums: Any = None,
    **options: Any,
) -> Any:
    """`pjit` with the keywords that it had; there `None` meant a copy on each."""
    said = {"in_shardings": in_axis_resources, "out_shardings": out_axis_resources}
    for name, value in said.items():
        if value is not _UNSAID:
            options[name] = jax.tree.map(
                lambda spec: PartitionSpec() if spec is None else spec,
                value,
                is_leaf=lambda spec: spec is None,
            )
    options |= {"static_argnums": static_argnums, "donate_argnums": donate_argnums}
    return _pjit(fun, **options)


def shuffle(key: Any, x: Any, axis: int = 0) -> jax.Array:
    """Shuffles along an axis, every slice in its own order."""
    return jax.random.permutation(key, x, axis, independent=True)


def msort(a: Any) -> jax.Array:
    """Sorts along the first axis."""
    return jnp.sort(a, axis=0)


def in1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False
) -> jax.Array:
    """Which elements of `ar1`, flattened, are in `ar2`."""
    return jnp.isin(ar1, ar2, assume_unique=assume_unique, invert=invert).ravel()


def tie_in(x: Any, y: Any) -> Any:
    """`y`: what ties values into a trace is the trace itself since 2020."""
    del x
    return y


def pvary(x: Any, axis_name: Any) -> Any:
    """Marks a value as different on each device of an axis."""
    return jax.lax.pcast(x, axis_name, to="varying")


def disable_x64() -> Any:
    """A context in which values have 32 bits."""
    return jax.enable_x64(False)


def setup_tpu(tpu_driver_version: str | None = None) -> None:
    """Nothing: JAX finds the TPUs of Colab by itself."""
    del tpu_driver_version


class _Index:
    def __getitem__(self, index: Any) -> Any:
        return index


index = _Index()
"""Writes an index as it stands between brackets: `index[1, :]`."""


def index_update(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """A copy of `x` with `y` at `idx`."""
    return jnp.asarray(x).at[idx].set(y, **options)


def index_add(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """A copy of `x` with `y` added at `idx`."""
    return jnp.asarray(x).at[idx].add(y, **options)


def index_mul(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """A copy of `x` multiplied by `y` at `idx`."""
    return jnp.asarray(x).at[idx].multiply(y, **options)


def index_min(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """A copy of `x` with the lesser of it and `y` at `idx`."""
    return jnp.asarray(x).at[idx].min(y, **options)


def index_max(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """A copy of `x` with the greater of it and `y` at `idx`."""
    return jnp.asarray(x).at[idx].max(y, **options)


# --- settings -------------------------------------------------------------------


class _Flags:
    """Reads and writes the options of `jax.config` as attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        jax.config.update(name, value)


FLAGS = _Flags()


def enable_omnistaging() -> None:
    """Nothing: it is always on."""
