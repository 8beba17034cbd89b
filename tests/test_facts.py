import jax
import pytest

from lockstep.devices.facts import Facts, gather_facts
from lockstep.devices.machine import count_cores


def test_gathers_what_jax_and_the_machine_say(monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "its value")
    facts = gather_facts()
    assert (facts.backend, facts.local_devices, facts.process_count) == ("cpu", 8, 1)
    assert facts.platforms == "cpu"
    assert facts.cpu_count == 8
    assert facts.start_error == ""
    assert facts.versions["jax"] == jax.__version__
    assert facts.environment["A_VARIABLE"] == "its value"
    assert facts.cores == count_cores()
    assert facts.built_in_cuda is False
    assert facts.simulated_on_purpose


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AssertionError(), "the installed JAX has no such platform"),
        (RuntimeError("Unable to initialize"), "Unable to initialize"),
    ],
)
def test_a_jax_that_cannot_start_gives_its_reason(monkeypatch, error, text):
    def fail():
        raise error

    monkeypatch.setattr("jax.devices", fail)
    facts = gather_facts()
    assert (facts.backend, facts.local_devices, facts.start_error) == ("none", 0, text)


def test_gpus_in_use():
    assert Facts(backend="gpu", local_devices=4).gpus_in_use == 4
    assert Facts(backend="cpu", local_devices=4).gpus_in_use == 0
