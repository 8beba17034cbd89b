"""Each advice, planted; no such machine is needed."""

import pytest

from lockstep.devices.advice import worth_knowing
from lockstep.devices.facts import Facts
from lockstep.devices.machine import Nvidia

SIMULATED = {"local_devices": 8, "cores": 8}
FLAGS = "--xla_force_host_platform_device_count=4"


def only_advice(**facts) -> str:
    (text,) = worth_knowing(Facts(**facts))
    return text


@pytest.mark.parametrize(
    "facts",
    [
        {**SIMULATED, "cpu_count": 8},
        {**SIMULATED, "environment": {"JAX_PLATFORMS": ""}},
        {**SIMULATED, "environment": {"JAX_PLATFORMS": "cpu"}, "platforms": "cpu"},
        # simulate_devices(8) replaced both variables, and said so
        {
            **SIMULATED,
            "cpu_count": 8,
            "platforms": "cpu",
            "environment": {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": FLAGS},
        },
        {
            "backend": "gpu",
            "nvidia": Nvidia(1, "580.1"),
            "environment": {"XLA_CLIENT_MEM_FRACTION": ".5"},
        },
        {"backend": "tpu", "local_devices": 4},
    ],
)
def test_says_nothing_where_all_is_well(facts):
    assert worth_knowing(Facts(**facts)) == ()


def test_jax_cannot_start():
    text = only_advice(backend="none", start_error="no such platform", platforms="cuda")
    assert text.startswith(
        "JAX cannot start on jax_platforms=cuda (no such platform): unset"
    )


def test_a_container_without_its_gpus():
    text = only_advice(**SIMULATED, nvidia=Nvidia(0, "580.1"))
    assert "an NVIDIA driver (580.1) runs here" in text
    assert "docker run --gpus all" in text


def test_jax_platforms_set_too_late():
    text = only_advice(**SIMULATED, environment={"JAX_PLATFORMS": "cuda"})
    assert text.startswith("JAX_PLATFORMS=cuda has no effect: it was set after JAX")


@pytest.mark.parametrize(
    ("variable", "value"), [("XLA_FLAGS", FLAGS), ("JAX_NUM_CPU_DEVICES", "4")]
)
def test_a_device_count_set_after_the_start(variable, value):
    text = only_advice(**SIMULATED, environment={variable: value})
    assert text.startswith(
        f"{variable} asks for 4 CPU devices, but JAX had already started with 8: "
    )
    assert "lockstep run --simulate 4 script.py" in text


def test_one_cpu_device():
    text = only_advice()
    assert text.startswith("JAX runs on one CPU device; to test on 8 stand-ins")
    assert "lockstep run --simulate 8" in text


@pytest.mark.parametrize(("cores", "text"), [(1, "1 core:"), (2, "2 cores:")])
def test_more_simulated_devices_than_cores(cores, text):
    advice = only_advice(local_devices=8, cores=cores, cpu_count=8)
    assert advice.startswith(f"8 simulated devices share {text}")


def test_tensorflow_beside_jax():
    text = only_advice(**SIMULATED, tensorflow_gpus=1)
    assert "TensorFlow is imported and sees 1 GPU:" in text
    assert 'tf.config.set_visible_devices([], "GPU")' in text


def test_memory_is_taken_in_advance_on_a_gpu():
    text = only_advice(backend="gpu")
    assert text.startswith("JAX takes 75% of each GPU's memory")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in text
