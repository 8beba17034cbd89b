"""Every `>>>` example of the package runs, on eight simulated devices.

Each may use `jax`, `jnp`, `np` and `ls` without importing them.
"""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep

MODULES = ["lockstep"] + [
    module.name
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"jax": jax, "jnp": jnp, "np": np, "ls": lockstep},
        optionflags=flags,
    )
    assert found.failed == 0


@pytest.mark.parametrize(
    "name", ["placement", "metrics", "rng", "step", "parallel", "data", "loop"]
)
def test_there_are_examples_in(name):
    rooms = [m for m in MODULES if f"{m}.".startswith(f"lockstep.{name}.")]
    found = map(doctest.DocTestFinder().find, map(importlib.import_module, rooms))
    assert any(test.examples for tests in found for test in tests)
