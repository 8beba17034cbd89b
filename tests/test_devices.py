import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh_process import run_python
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.devices import describe, describe_devices, make_mesh
from lockstep.devices import mesh as mesh_module
from lockstep.devices.facts import Facts
from lockstep.devices.machine import Nvidia

# --- make_mesh ---------------------------------------------------------------------


def test_by_default_one_axis_over_all_devices():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 8}
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"data": 8}, {"data": 8}),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"data": -1, "model": 2}, {"data": 4, "model": 2}),
        ({"model": 8, "data": -1}, {"model": 8, "data": 1}),
        ({"a": 2, "b": np.int64(2), "c": -1}, {"a": 2, "b": 2, "c": 2}),
    ],
)
def test_sizes(axes, shape):
    assert dict(make_mesh(axes).shape) == shape


@pytest.mark.parametrize("chosen", [None, 4])
def test_axes_are_auto(chosen):
    mesh = make_mesh({"data": -1, "model": 2}, chosen and jax.devices()[:chosen])
    assert mesh.axis_types == (AxisType.Auto,) * 2


def test_an_unchanged_function_runs_on_the_mesh():
    # Where axes are Explicit, picking rows of a split array is refused.
    split = NamedSharding(make_mesh(), P("data"))
    rows = jax.device_put(jnp.arange(16.0).reshape(8, 2), split)
    picked = jax.jit(lambda x: x[jnp.array([7, 0, 7])])(rows)
    np.testing.assert_array_equal(picked, [[14, 15], [0, 1], [14, 15]])


def test_given_devices_keep_their_order():
    chosen = [jax.devices()[i] for i in (5, 2, 7, 0)]
    mesh = make_mesh({"data": 2, "model": 2}, chosen)
    assert [[d.id for d in row] for row in mesh.devices] == [[5, 2], [7, 0]]


def test_devices_come_as_a_grid_too():
    grid = np.array(jax.devices()).reshape(2, 4)
    assert dict(make_mesh(devices=grid).shape) == {"data": 8}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"data": 3, "model": 2},
            "axes {'data': 3, 'model': 2} need 6 devices, but there are 8: use "
            "{'data': 4, 'model': 2}, or fewer devices: devices=jax.devices()[:6]",
        ),
        (
            {"data": 16},
            "axes {'data': 16} need 16 devices, but there are 8: use {'data': 8}",
        ),
        (
            {"data": -1, "model": 3},
            "axes {'data': -1, 'model': 3} need a multiple of 3 devices, but there are "
            "8: use {'data': 2, 'model': 4}, or fewer devices: "
            "devices=jax.devices()[:6]",
        ),
        (
            {"data": -1, "model": 16},
            "axes {'data': -1, 'model': 16} need a multiple of 16 devices, but there "
            "are 8: use {'data': 1, 'model': 8}",
        ),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices(axes, message):
    with pytest.raises(ValueError) as error:
        make_mesh(axes)
    assert str(error.value) == message


@pytest.mark.parametrize("sizes", [(3, 2), (7,), (5, 5, 5), (1, 9), (100, 1, 1)])
def test_the_sizes_of_the_message_are_valid(sizes):
    best = mesh_module._nearest(sizes, 8)
    assert math.prod(best) == 8
    assert len(best) == len(sizes)


@pytest.mark.parametrize(
    ("axes", "kind", "message"),
    [
        ({"data": 0}, ValueError, "axis 'data' has the size 0: use 1 or more"),
        ({"data": -2}, ValueError, "axis 'data' has the size -2: use 1 or more"),
        ({"data": -1, "b": -1}, ValueError, "only one size can be -1"),
        ({}, ValueError, "axes is empty"),
        ({"": 8}, ValueError, "axis name '': use an identifier such as 'data'"),
        ({"my axis": 8}, ValueError, "axis name 'my axis'"),
        ({0: 8}, ValueError, "axis name 0"),
        ({"data": 8.0}, TypeError, "axis 'data' has the size 8.0: use an int"),
        ({"data": True}, TypeError, "axis 'data' has the size True: use an int"),
        (8, TypeError, "axes is 8, no mapping of names to sizes"),
        (["data"], TypeError, "no mapping of names to sizes"),
    ],
)
def test_refuses_axes(axes, kind, message):
    with pytest.raises(kind, match=message):
        make_mesh(axes)


@pytest.mark.parametrize(
    ("chosen", "kind", "message"),
    [
        ([], ValueError, "devices is empty"),
        (4, TypeError, "devices is 4: give a sequence"),
        ([0, 1], TypeError, "devices holds 0, which is no device of JAX"),
    ],
)
def test_refuses_devices(chosen, kind, message):
    with pytest.raises(kind, match=message):
        make_mesh(devices=chosen)


def test_refuses_a_device_that_comes_twice():
    first, second = jax.devices()[:2]
    with pytest.raises(ValueError, match=f"devices holds {first} 2 times"):
        make_mesh(devices=[first, second, first])


# --- describe_devices --------------------------------------------------------------


def test_describes_the_devices_of_this_process():
    report = describe_devices()
    assert report.backend == "cpu"
    assert (report.total_devices, report.local_devices) == (8, 8)
    assert report.kinds == {"cpu": 8}
    assert report.memory_bytes == (None,) * 8
    assert (report.process_index, report.process_count) == (0, 1)
    assert list(report.versions)[:3] == ["python", "jax", "jaxlib"]
    assert report.versions["jax"] == jax.__version__


def test_idle_hardware_comes_first_in_the_advice(monkeypatch):
    facts = Facts(nvidia=Nvidia(gpus=1), local_devices=8, cores=2)
    monkeypatch.setattr(describe, "gather_facts", lambda: facts)
    report = describe_devices()
    assert report.idle_hardware
    idle, other = report.advice
    assert "1 NVIDIA GPU, but the installed JAX is for the CPU only" in idle
    assert "8 simulated devices share 2 cores" in other


def test_other_advice_is_no_idle_hardware(monkeypatch):
    facts = Facts(local_devices=8, cores=2)
    monkeypatch.setattr(describe, "gather_facts", lambda: facts)
    report = describe_devices()
    assert len(report.advice) == 1
    assert not report.idle_hardware


def test_reports_memory_where_devices_tell_it():
    class Told:
        def memory_stats(self):
            return {"bytes_limit": 5, "bytes_in_use": 1}

    assert describe._memory(Told()) == 5


# Platforms that this JAX lacks end `jax.devices()` in a bare AssertionError.
CANNOT_START = """
from lockstep.devices import describe_devices
report = describe_devices()
assert (report.backend, report.total_devices, report.memory_bytes) == ("none", 0, ())
print(report)
"""


def test_describes_a_jax_that_cannot_start():
    result = run_python("-c", CANNOT_START, JAX_PLATFORMS="cuda")
    assert result.returncode == 0, result.stderr
    assert "advice    JAX cannot start on jax_platforms=cuda" in result.stdout
