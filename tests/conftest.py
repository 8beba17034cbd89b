"""Eight simulated CPU devices and one compilation cache for the whole run."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable

# Before the first import of JAX: a machine with an accelerator tests the same thing.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

DEVICES = 8


def _share_one_compilation_cache() -> None:
    """Lets equal programs compile once a run; a tiny step costs about a second."""
    folder = tempfile.mkdtemp(prefix="lockstep-compilations-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


jax.config.update("jax_num_cpu_devices", DEVICES)
_share_one_compilation_cache()


def make_mesh_of(count: int, axes: dict[str, int] | None = None) -> Mesh:
    """A mesh over the first `count` devices, by default one axis named `data`."""
    devices = jax.devices()
    assert len(devices) == DEVICES, f"the tests need {DEVICES} devices, see {devices}"
    shape = axes or {"data": count}
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices[:count],
    )


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., Mesh]:
    """The factory `mesh_of(4)` or `mesh_of(8, {"data": 4, "model": 2})`."""
    return make_mesh_of


@pytest.fixture
def float64():
    """Double precision inside the test, which separates bugs from rounding."""
    with jax.enable_x64(True):
        yield
