"""The table of names, held to the JAX, Flax and Optax that are installed."""

import importlib
import warnings

import jax
import pytest

from lockstep.compat.flags import FLAGS
from lockstep.compat.names import NAMES, look_up
from lockstep.compat.naming import Kind

GONE = [row for row in NAMES.values() if row.gone]
THERE = [row for row in NAMES.values() if not row.gone]


def find(dotted: str):
    """The object of that name today; AttributeError or ImportError if there is none."""
    owner, *parts = dotted.split(".")
    found, path = importlib.import_module(owner), owner
    if dotted.startswith("jax.Array."):  # of arrays themselves, not of their type
        return getattr(jax.numpy.ones(()), parts[1])
    for part in parts:
        path += f".{part}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names on their way out
            if not hasattr(found, part):
                importlib.import_module(path)
            found = getattr(found, part)
    return found


def is_there(dotted: str) -> bool:
    """Whether the name can be used today."""
    try:
        find(dotted)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("row", GONE, ids=lambda row: row.old)
def test_what_is_called_gone_is_gone(row):
    assert not is_there(row.old)


@pytest.mark.parametrize("row", THERE, ids=lambda row: row.old)
def test_what_is_not_called_gone_is_there(row):
    assert is_there(row.old)


@pytest.mark.parametrize("row", NAMES.values(), ids=lambda row: row.old)
def test_what_stands_in_its_place_exists(row):
    assert row.today
    for dotted in {row.rename, row.restore} - {""}:
        assert is_there(dotted), dotted


def test_a_rename_is_what_is_restored():
    for row in NAMES.values():
        if row.rename and row.restore:
            assert row.rename == row.restore, row.old


def test_what_means_something_else_is_no_pure_rename():
    for row in NAMES.values():
        assert not (row.rename and row.kind in (Kind.CHANGED, Kind.DEAD)), row.old


@pytest.mark.parametrize("name", FLAGS)
def test_options_that_are_called_gone_are_gone(name):
    assert name not in jax.config.values
    with pytest.raises(AttributeError):
        jax.config.update(name, FLAGS[name][0])


def test_the_names_that_old_code_uses_most_have_rows():
    for name in (
        "jax.device_put_replicated jax.device_put_sharded jax.tree_map "
        "jax.tree_multimap jax.tree_leaves jax.tree_flatten jax.tree_unflatten "
        "jax.tree_structure jax.tree_reduce jax.tree_transpose jax.tree_all "
        "jax.tree_util.tree_multimap jax.lib.xla_bridge.device_count "
        "jax.lib.xla_bridge.get_backend jax.replicate jax.unreplicate "
        "jax.sharding.PmapSharding jax.random.KeyArray jax.numpy.DeviceArray "
        "jax.interpreters.pxla.ShardedDeviceArray jax.interpreters.xla.DeviceArray "
        "jax.experimental.PartitionSpec jax.experimental.pjit.PartitionSpec "
        "jax.experimental.pjit.with_sharding_constraint jax.experimental.maps.Mesh "
        "flax.training.common_utils.pmean jax.config.config"
    ).split():
        assert NAMES[name].restore, name


class TestLookUp:
    def test_finds_a_name(self):
        row = look_up("jax.tree_map")
        assert row is not None and row.rename == "jax.tree.map"

    def test_finds_the_module_that_a_name_lies_in(self):
        row = look_up("flax.optim.Adam")
        assert row is not None and row.old == "flax.optim"

    def test_prefers_the_longer_name(self):
        row = look_up("jax.experimental.maps.Mesh")
        assert row is not None and row.rename == "jax.sharding.Mesh"

    @pytest.mark.parametrize("name", ["jax", "jax.tree.map", "flax.nnx.Module", "x"])
    def test_knows_nothing_of_other_names(self, name):
        assert look_up(name) is None
