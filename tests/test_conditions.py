"""What the bits of a run depend on."""

import json

import jax
import optax

from lockstep.step import make_train_step
from lockstep.step.conditions import changed, conditions


def of(**options):
    step = make_train_step(
        lambda w, x: w * x, optax.sgd(0.1), axis_name="data", **options
    )
    return conditions(step, 64)


def test_they_survive_being_written_down():
    here = of(fixed_shards=8)
    assert json.loads(json.dumps(here)) == here
    assert changed(json.loads(json.dumps(here)), of(fixed_shards=8)) == []


def test_other_options_of_the_step_are_named():
    before, now = of(fixed_shards=8), of(fixed_shards=4, accumulate=2)
    assert changed(before, now) == ["fixed_shards: 8 -> 4", "accumulate: 1 -> 2"]


def test_flags_of_the_compiler_count_and_the_number_of_devices_does_not(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    before = of(fixed_shards=8)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert changed(before, of(fixed_shards=8)) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found = changed(before, of(fixed_shards=8))
    assert found == ["xla_flags:  -> --xla_cpu_enable_fast_math=true"]


def test_settings_of_jax_count():
    before = of(fixed_shards=8)
    with jax.enable_x64(True):
        assert changed(before, of(fixed_shards=8)) == ["x64: False -> True"]


def test_a_condition_of_a_newer_version_counts_as_changed():
    assert changed({}, {"cores": 2}) == ["cores: None -> 2"]
