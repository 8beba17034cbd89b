"""Each reason for idle GPUs, planted; no GPU is needed."""

import dataclasses

import pytest

from lockstep.devices.facts import Facts
from lockstep.devices.idle_gpus import why_idle
from lockstep.devices.machine import Nvidia

CPU_ONLY = Facts(
    nvidia=Nvidia(gpus=2, driver="580.65.06"),
    versions={"jax": "0.12.0.1", "jaxlib": "0.12.0.1"},
)
WITH_PLUGIN = dataclasses.replace(
    CPU_ONLY, versions={**CPU_ONLY.versions, "jax-cuda13-plugin": "0.12.0.1"}
)
ON_GPUS = dataclasses.replace(WITH_PLUGIN, backend="gpu", local_devices=2)


def only_reason(facts: Facts, **changes) -> str:
    (text,) = why_idle(dataclasses.replace(facts, **changes))
    return text


def test_nothing_is_idle_where_all_gpus_are_used():
    assert why_idle(ON_GPUS) == ()


def test_nothing_is_idle_where_there_is_no_gpu():
    assert why_idle(Facts()) == ()


def test_simulating_on_purpose_leaves_no_gpu_idle_by_mistake():
    simulated = dataclasses.replace(
        CPU_ONLY, platforms="cpu", cpu_count=8, local_devices=8
    )
    assert why_idle(simulated) == ()


@pytest.mark.parametrize(
    ("driver", "command"),
    [
        ("580.65.06", 'CUDA plugin): pip install -U "jax[cuda13]"'),
        ("535.183.01", 'CUDA plugin): pip install -U "jax[cuda12]"'),
        (None, 'CUDA plugin): pip install -U "jax[cuda13]"'),
        (
            "470.1.2",
            "update the NVIDIA driver 470.1.2 to 525 or newer, then pip install -U "
            '"jax[cuda12]"',
        ),
    ],
)
def test_a_cpu_only_jax_names_the_extra_that_this_driver_runs(driver, command):
    text = only_reason(CPU_ONLY, nvidia=Nvidia(gpus=1, driver=driver))
    assert text.startswith("this machine has 1 NVIDIA GPU, but the installed JAX is ")
    assert command in text


def test_a_cpu_only_jax_warns_of_the_dead_extra():
    text = only_reason(CPU_ONLY)
    assert 'The "jax[cuda12_pip]" of older guides no longer exists: pip warns' in text


def test_the_dead_extra_is_dead_only_where_jax_lacks_it():
    text = only_reason(CPU_ONLY, extras=frozenset({"cuda12", "cuda12-pip"}))
    assert "cuda12_pip" not in text


def test_only_extras_that_this_jax_has_are_named():
    assert "jax[cuda12]" in only_reason(CPU_ONLY, extras=frozenset({"cuda12"}))
    assert "docs.jax.dev" in only_reason(CPU_ONLY, extras=frozenset())


def test_a_jaxlib_with_cuda_inside_needs_no_plugin():
    text = only_reason(CPU_ONLY, built_in_cuda=True)
    assert text.startswith("this machine has 2 NVIDIA GPUs, but JAX uses none; ")


def test_a_plugin_of_another_version_is_named_with_both_versions():
    text = only_reason(
        CPU_ONLY, versions={"jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.10.2"}
    )
    assert "jax-cuda12-plugin 0.10.2 does not belong to jaxlib 0.12.0.1" in text
    assert "pip install" in text


def test_a_build_tag_makes_no_other_version():
    versions = {"jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1+local"}
    assert "does not belong" not in only_reason(CPU_ONLY, versions=versions)


def test_a_driver_too_old_for_the_plugin():
    text = only_reason(WITH_PLUGIN, nvidia=Nvidia(gpus=2, driver="535.183.01"))
    assert "535.183.01 is too old for the installed jax-cuda13-plugin" in text
    assert 'needs 580 or newer: pip install -U "jax[cuda12]"' in text


def test_hidden_gpus_are_counted():
    text = only_reason(
        ON_GPUS, local_devices=1, environment={"CUDA_VISIBLE_DEVICES": "1"}
    )
    assert text.startswith(
        "CUDA_VISIBLE_DEVICES='1' lets JAX see 1 of 2 NVIDIA GPUs: unset it"
    )


def test_all_gpus_hidden():
    text = only_reason(WITH_PLUGIN, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES='' lets JAX see 0 of 2 NVIDIA GPUs" in text


def test_other_processes_use_the_other_gpus():
    facts = dataclasses.replace(
        ON_GPUS,
        local_devices=1,
        process_count=2,
        environment={"CUDA_VISIBLE_DEVICES": "1"},
    )
    assert why_idle(facts) == ()


def test_jax_platforms_set_in_the_environment():
    text = only_reason(
        WITH_PLUGIN, platforms="cpu", environment={"JAX_PLATFORMS": "cpu"}
    )
    assert text == (
        "JAX_PLATFORMS=cpu keeps JAX from the 2 NVIDIA GPUs of this machine: unset it"
    )


def test_jax_platforms_set_in_the_program():
    text = only_reason(WITH_PLUGIN, platforms="cpu")
    assert text.startswith("the JAX setting jax_platforms=cpu keeps JAX from")


def test_platforms_that_include_cuda_keep_nothing_away():
    text = only_reason(WITH_PLUGIN, platforms="cuda,cpu")
    assert "JAX uses none" in text


def test_all_reasons_are_given_at_once():
    facts = dataclasses.replace(
        CPU_ONLY,
        platforms="cpu",
        environment={"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert len(why_idle(facts)) == 3


def test_without_a_known_reason_jax_is_asked():
    text = only_reason(WITH_PLUGIN)
    assert "`JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'`" in text
