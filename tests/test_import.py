"""`import lockstep` only imports: no backend, no setting, no variable changes."""

import importlib
import pkgutil
import types

import pytest
from fresh_process import run_python

import lockstep as ls

SETTINGS = """
import os, jax
variables, settings = dict(os.environ), dict(jax.config.values)
import lockstep
for name in lockstep.__all__:
    getattr(lockstep, name)
assert dict(os.environ) == variables
assert dict(jax.config.values) == settings
"""

BACKEND = """
import jax, lockstep
for name in lockstep.__all__:
    getattr(lockstep, name)
# JAX refuses this once a backend has started.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""

STARTED = """
import jax
jax.devices()
try:
    jax.config.update("jax_num_cpu_devices", 3)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit("a started backend took another device count")
"""

HEAVY = """
import sys, lockstep
for name in lockstep.__all__:
    getattr(lockstep, name)
heavy = {"flax", "grain", "libcst", "matplotlib", "orbax", "rich", "sklearn",
         "tensorboardX", "tensorflow", "torch", "typer"} & set(sys.modules)
assert not heavy, f"every name was read, and these were imported: {heavy}"
"""


@pytest.mark.parametrize(
    "program",
    [SETTINGS, BACKEND, STARTED, HEAVY],
    ids=["settings", "backend", "started_backend_is_noticed", "heavy_libraries"],
)
def test_import_changes_nothing(program):
    done = run_python("-W", "error", "-c", program, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ls.__all__)
def test_every_public_name_is_there(name):
    assert getattr(ls, name) is not None


def test_no_module_hides_a_function_of_its_name():
    """Loading a submodule binds its name in the package, over a function's."""
    for module in pkgutil.walk_packages(ls.__path__, "lockstep."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    modules = {n for n in ls.__all__ if isinstance(getattr(ls, n), types.ModuleType)}
    assert modules == {
        "callbacks",
        "compat",
        "data",
        "debug",
        "distributed",
        "ray",
        "sharding",
        "writers",
    }


def test_an_unknown_name_is_named():
    with pytest.raises(AttributeError, match="'lockstep' has no attribute 'Trayner'"):
        ls.Trayner  # noqa: B018


def test_names_are_offered_for_completion():
    assert set(ls.__all__) <= set(dir(ls))
