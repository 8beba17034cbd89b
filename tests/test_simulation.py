import os
import sys

import jax
import pytest
from fresh_process import run_python

from lockstep import notices
from lockstep.simulation import (
    backend_started,
    requested_counts,
    simulate_by_environment,
    simulate_devices,
)

FLAG = "--xla_force_host_platform_device_count"

BEFORE_AND_AFTER_THE_START = """
import jax
from lockstep.simulation import backend_started, simulate_devices

settings = jax.config.jax_num_cpu_devices, jax.config.jax_platforms
assert not backend_started()
assert (jax.config.jax_num_cpu_devices, jax.config.jax_platforms) == settings
simulate_devices(6)
simulate_devices(4)
assert not backend_started(), "simulating is not starting"
assert [d.platform for d in jax.devices()] == ["cpu"] * 4
assert backend_started()
simulate_devices(4)
try:
    simulate_devices(8)
except RuntimeError as error:
    print(error)
assert jax.device_count() == 4
"""


def simulate_in_a_fresh_process(**environment):
    result = run_python("-c", BEFORE_AND_AFTER_THE_START, **environment)
    assert result.returncode == 0, result.stderr
    return result


def test_simulates_before_the_start_and_refuses_after_it():
    result = simulate_in_a_fresh_process()
    assert result.stderr == ""
    assert result.stdout.startswith("simulate_devices(8) comes too late: JAX has ")
    assert "started with 4 cpu devices" in result.stdout
    assert "lockstep run --simulate 8" in result.stdout


def test_wins_over_inherited_counts_and_says_so():
    result = simulate_in_a_fresh_process(
        XLA_FLAGS=f"{FLAG}=2", JAX_NUM_CPU_DEVICES="3", JAX_PLATFORMS="cuda"
    )
    assert "simulating 4 devices, not the 2 that XLA_FLAGS in the" in result.stderr
    assert "not the 3 that JAX_NUM_CPU_DEVICES in the" in result.stderr


def test_the_tests_devices_are_right_already():
    simulate_devices(8)
    assert jax.device_count() == 8


def test_too_late_in_this_process():
    with pytest.raises(RuntimeError, match="already started with 8 cpu devices"):
        simulate_devices(4)


def test_other_hardware_is_never_right_already(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="already started with 8 gpu devices"):
        simulate_devices(8)


@pytest.mark.parametrize("count", [0, -2])
def test_refuses_counts_below_one(count):
    with pytest.raises(ValueError, match=f"cannot simulate {count} devices"):
        simulate_devices(count)


@pytest.mark.parametrize(
    ("count", "kind"), [(2.0, "float"), ("8", "str"), (True, "bo")]
)
def test_refuses_what_is_no_int(count, kind):
    with pytest.raises(TypeError, match=f"is an int, not {kind}"):
        simulate_devices(count)


def test_the_backend_has_started_here():
    jax.devices()
    assert backend_started() is True
    assert jax.device_count() == 8


@pytest.fixture
def before_jax(monkeypatch):
    """As in a process that has not imported JAX; puts the variables back."""
    notices.reset()
    monkeypatch.delitem(sys.modules, "jax")
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
    yield monkeypatch
    notices.reset()


def test_the_environment_carries_it_to_a_later_import(before_jax):
    simulate_by_environment(5)
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "5"
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_the_environment_says_what_loses(before_jax, caplog):
    before_jax.setenv("XLA_FLAGS", f"--xla_dump_to=/x {FLAG}=3")
    simulate_by_environment(5)
    assert "simulating 5 devices, not the 3 that XLA_FLAGS" in caplog.text


def test_an_equal_count_is_not_worth_a_word(before_jax, caplog):
    before_jax.setenv("XLA_FLAGS", f"{FLAG}=5")
    simulate_by_environment(5)
    assert caplog.text == ""


def test_the_environment_is_too_late_once_jax_has_started():
    with pytest.raises(RuntimeError, match="comes too late"):
        simulate_by_environment(5)


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        ({}, {}),
        ({"XLA_FLAGS": "--xla_dump_to=/x"}, {}),
        ({"XLA_FLAGS": f"{FLAG}=2 --other {FLAG}=16"}, {"XLA_FLAGS": 16}),
        ({"JAX_NUM_CPU_DEVICES": "4"}, {"JAX_NUM_CPU_DEVICES": 4}),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, {}),
    ],
)
def test_reads_the_counts_of_an_environment(environment, counts):
    assert requested_counts(environment) == counts
