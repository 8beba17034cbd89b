"""Names of the pmap era in this process: what they mean, and that they go again."""

import importlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fresh_process import run_lockstep, run_python
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import compat
from lockstep.compat.install import explain

# The first random number of key 0, printed in many a tutorial of the time.
FIRST_NORMAL_OF_THE_ERA = -0.20584226


@pytest.fixture
def era():
    """The names, for the length of one test."""
    with compat.installed():
        yield


def get(dotted: str):
    """The object at a dotted name, as old code would reach it."""
    owner, *parts = dotted.split(".")
    found = importlib.import_module(owner)
    for part in parts:
        found = getattr(found, part)
    return found


@pytest.mark.usefixtures("era")
class TestDataParallelNames:
    def test_the_helpers_are_those_of_compat(self):
        assert get("jax.device_put_replicated") is compat.device_put_replicated
        assert get("jax.device_put_sharded") is compat.device_put_sharded
        assert get("jax.pmap") is compat.pmap

    def test_a_bfloat16_state_with_a_replicated_python_float_stays_bfloat16(self):
        state = {"w": jnp.ones(4, jnp.bfloat16), "lr": 0.5, "step": 0}
        state = get("jax.device_put_replicated")(state, jax.local_devices())

        @partial(jax.pmap, axis_name="i")
        def step(state, x):
            g = jax.lax.pmean(x * state["w"], "i")
            new = {"w": state["w"] - state["lr"] * g}
            return state | new | {"step": state["step"] + 1}

        x = np.ones((8, 4), jnp.bfloat16)
        for _ in range(3):
            state = step(state, x)
        assert state["w"].dtype == jnp.bfloat16
        assert state["step"].dtype == jnp.int32
        assert state["lr"].weak_type
        np.testing.assert_array_equal(state["w"].astype(np.float32), 0.125)

    def test_pmap_takes_an_array_that_is_committed_to_one_device(self):
        x = jax.device_put(np.arange(8.0), jax.devices()[3])
        np.testing.assert_array_equal(jax.pmap(lambda v: v + 1)(x), np.arange(8.0) + 1)

    def test_the_buffers_of_an_array_say_where_its_rows_lie(self):
        devices = jax.devices()[4:1:-1]
        rows = get("jax.device_put_sharded")([1.0, 2.0, 3.0], devices)
        assert [buffer.device() for buffer in rows.device_buffers] == devices
        assert [np.asarray(buffer).item() for buffer in rows.device_buffers] == [
            1,
            2,
            3,
        ]
        assert rows.device_buffers[1].shape == ()
        one = jax.device_put(np.ones(2), jax.devices()[5])
        assert one.device_buffer.device() == jax.devices()[5]
        np.testing.assert_array_equal(np.asarray(one.device_buffer), [1, 1])

    def test_what_pmap_returns_has_a_pmap_sharding(self):
        out = jax.pmap(lambda v: v)(np.ones((8, 2)))
        sharding, array = get("jax.sharding.PmapSharding"), "ShardedDeviceArray"
        assert isinstance(out.sharding, sharding)
        assert isinstance(out, get(f"jax.interpreters.pxla.{array}"))
        assert isinstance(out, get(f"jax.{array}"))

    def test_other_layouts_have_none(self, mesh_of):
        sharding = get("jax.sharding.PmapSharding")
        two = mesh_of(8, {"data": 4, "model": 2})
        for spec in (P(), P(None, "data"), P("data"), P("data", "model")):
            assert not isinstance(NamedSharding(two, spec), sharding)
        assert not isinstance(NamedSharding(mesh_of(8), P()), sharding)
        assert not isinstance(jnp.ones(8).sharding, sharding)
        array = get("jax.interpreters.pxla.ShardedDeviceArray")
        assert not isinstance(jnp.ones(8), array)
        assert not isinstance(np.ones(8), array)

    def test_a_pmap_sharding_is_not_built_but_its_default_is(self):
        sharding = get("jax.sharding.PmapSharding")
        with pytest.raises(TypeError, match="NamedSharding"):
            sharding(jax.devices(), None)
        layout = sharding.default((4, 3))
        assert isinstance(layout, sharding)
        assert layout.shard_shape((4, 3)) == (1, 3)
        with pytest.raises(ValueError, match="9 rows for 8 devices"):
            sharding.default((9, 3))

    def test_the_bridge_is_importable_both_ways(self):
        from jax.lib import xla_bridge  # pyright: ignore

        module = importlib.import_module("jax.lib.xla_bridge")
        assert module is xla_bridge
        assert xla_bridge.device_count() == 8
        assert xla_bridge.get_backend().platform == "cpu"

    def test_the_helpers_of_2019(self):
        state = get("jax.replicate")({"w": np.arange(3.0)})
        assert state["w"].shape == (8, 3)
        assert get("jax.unreplicate")(state)["w"].shape == (3,)

    def test_the_pmean_of_flax_averages_over_batch(self):
        pmean = get("flax.training.common_utils.pmean")
        out = jax.pmap(lambda v: pmean({"x": v}), axis_name="batch")(np.arange(8.0))
        np.testing.assert_array_equal(out["x"], np.full(8, 3.5))

    def test_the_helpers_of_flax_mean_what_they_meant(self):
        for name in ("replicate", "unreplicate", "prefetch_to_device"):
            assert get(f"flax.jax_utils.{name}") is getattr(compat, name)
        assert get("flax.training.common_utils.get_metrics") is compat.get_metrics
        assert get("flax.training.common_utils.stack_forest") is compat.stack_forest
        assert get("flax.jax_utils.replicate")(0.1).weak_type


@pytest.mark.usefixtures("era")
class TestRenamedNames:
    TREE = {"a": 1, "b": [2, 3]}

    def test_the_family_of_tree_functions(self):
        leaves, structure = get("jax.tree_flatten")(self.TREE)
        assert leaves == get("jax.tree_leaves")(self.TREE) == [1, 2, 3]
        assert structure == get("jax.tree_structure")(self.TREE)
        assert get("jax.tree_unflatten")(structure, leaves) == self.TREE
        assert get("jax.tree_reduce")(lambda a, b: a + b, self.TREE) == 6
        assert get("jax.tree_all")({"a": True, "b": False}) is False
        inner = jax.tree.structure([0, 0])
        swapped = get("jax.tree_transpose")(
            structure, inner, {"a": [1, 2], "b": [[3, 4], [5, 6]]}
        )
        assert swapped == [{"a": 1, "b": [3, 5]}, {"a": 2, "b": [4, 6]}]

    @pytest.mark.parametrize(
        "name", ["jax.tree_map", "jax.tree_multimap", "jax.tree_util.tree_multimap"]
    )
    def test_tree_map_takes_more_trees_and_is_leaf(self, name):
        tree_map = get(name)
        assert tree_map(lambda x, y: x + y, self.TREE, self.TREE) == {
            "a": 2,
            "b": [4, 6],
        }
        lists = tree_map(len, {"b": [2, 3]}, is_leaf=lambda x: isinstance(x, list))
        assert lists == {"b": 2}

    def test_config_is_an_object_and_also_a_module(self):
        from jax.config import config  # pyright: ignore

        assert config is jax.config
        assert importlib.import_module("jax.config").config is jax.config
        assert jax.config.jax_enable_x64 is False
        flags = importlib.import_module("jax.config").FLAGS
        assert flags.jax_enable_x64 is False
        config.enable_omnistaging()

    def test_options_that_are_always_on_may_be_turned_on(self):
        jax.config.update("jax_array", True)
        jax.config.update("jax_pmap_shmap_merge", True)

    def test_which_pmap_it_shall_be_may_be_said_either_way(self):
        """`False` asked for what `compat.pmap` means."""
        jax.config.update("jax_pmap_shmap_merge", False)

    def test_what_notebooks_for_colab_begin_with_does_nothing(self):
        setup = importlib.import_module("jax.tools.colab_tpu")
        assert setup.setup_tpu() is setup.setup_tpu("tpu_driver-0.1dev") is None
        assert get("jax.tools.colab_tpu") is setup

    def test_the_compilation_cache_is_set_under_its_old_name(self):
        name = "jax.experimental.compilation_cache.compilation_cache"
        cache = importlib.import_module(name)
        assert cache.initialize_cache is cache.set_cache_dir

    def test_optix_is_optax(self):
        from jax.experimental import optix  # pyright: ignore

        assert optix is optax

    def test_options_that_are_gone_may_not_be_turned_back(self):
        with pytest.raises(AttributeError, match="every array is a jax.Array"):
            jax.config.update("jax_array", False)
        with pytest.raises(AttributeError, match="without the device axis"):
            jax.config.update("jax_pmap_no_rank_reduction", False)
        with pytest.raises(AttributeError, match="Unrecognized"):
            jax.config.update("jax_nonsense", 1)

    def test_other_options_are_set_as_ever(self):
        before = jax.config.jax_numpy_rank_promotion
        jax.config.update("jax_numpy_rank_promotion", "raise")
        assert jax.config.jax_numpy_rank_promotion == "raise"
        jax.config.update("jax_numpy_rank_promotion", before)

    @pytest.mark.parametrize(
        ("old", "today"),
        {
            "jax.random.KeyArray": "jax.Array",
            "jax.numpy.DeviceArray": "jax.Array",
            "jax.interpreters.xla.DeviceArray": "jax.Array",
            "jax.experimental.PartitionSpec": "jax.sharding.PartitionSpec",
            "jax.experimental.pjit.PartitionSpec": "jax.sharding.PartitionSpec",
            "jax.experimental.maps.Mesh": "jax.sharding.Mesh",
            "jax.interpreters.pxla.Mesh": "jax.sharding.Mesh",
            "jax.core.Primitive": "jax.extend.core.Primitive",
            "jax.partial": "functools.partial",
            "flax.optim.dynamic_scale": "flax.training.dynamic_scale",
            "optax.additive_weight_decay": "optax.add_decayed_weights",
        }.items(),
    )
    def test_aliases(self, old, today):
        assert get(old) is get(today)

    def test_modules_that_moved_can_be_imported(self):
        from jax.experimental import optimizers  # pyright: ignore
        from jax.experimental.optimizers import adam  # pyright: ignore

        assert optimizers.adam is adam
        assert adam is importlib.import_module("jax.example_libraries.optimizers").adam
        assert importlib.import_module("jax.experimental.maps").Mesh is Mesh

    def test_clip_takes_the_names_that_it_had(self):
        x = jnp.arange(5)
        for clipped in (
            jnp.clip(x, a_min=1, a_max=3),  # pyright: ignore
            jnp.clip(x, 1, a_max=3),  # pyright: ignore
            jnp.clip(a=x, a_min=1, a_max=3),  # pyright: ignore
            jnp.clip(x, min=1, max=3),
            jnp.clip(x, 1, 3),
        ):
            assert clipped.tolist() == [1, 1, 2, 3, 3]
        assert jnp.clip(x, a_max=3).tolist() == [0, 1, 2, 3, 3]  # pyright: ignore

    @pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
    def test_pjit_takes_the_keywords_that_it_had(self):
        with Mesh(np.array(jax.devices()), "x"):
            double = get("jax.experimental.pjit.pjit")(
                lambda x, y: x * y,
                in_axis_resources=(P("x"), None),
                out_axis_resources=P("x"),
            )
            doubled = double(np.arange(8.0), 2.0)
        assert doubled.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert doubled.sharding.spec == P("x")

    def test_indexed_updates(self):
        ops, x = get("jax.ops"), np.arange(6.0).reshape(2, 3)
        index = ops.index[1, :2]
        assert ops.index_update(x, index, 9).tolist() == [[0, 1, 2], [9, 9, 5]]
        assert ops.index_add(x, index, 1).tolist() == [[0, 1, 2], [4, 5, 5]]
        assert ops.index_mul(x, index, 2).tolist() == [[0, 1, 2], [6, 8, 5]]
        assert ops.index_min(x, index, 3).tolist() == [[0, 1, 2], [3, 3, 5]]
        assert ops.index_max(x, index, 4).tolist() == [[0, 1, 2], [4, 4, 5]]
        assert x[1, 0] == 3

    def test_an_array_of_one_element_is_a_number(self):
        one = jax.pmap(lambda v: v, devices=jax.devices()[:1])(np.array([3.0]))
        assert (float(one), int(one), complex(one)) == (3.0, 3, 3 + 0j)
        assert float(jnp.float32(0.5)) == 0.5
        with pytest.raises(TypeError, match="one element"):
            float(jnp.ones(2))

    def test_small_functions(self):
        x = np.array([[3, 1], [2, 4]])
        assert jnp.msort(x).tolist() == [[2, 1], [3, 4]]  # pyright: ignore
        assert jnp.in1d(x, np.array([1, 2])).tolist() == [False, True, True, False]  # pyright: ignore
        assert get("jax.lax.tie_in")(1, 2) == 2
        shuffled = get("jax.random.shuffle")(jax.random.key(0), np.arange(9))
        assert sorted(shuffled.tolist()) == list(range(9))
        with get("jax.experimental.disable_x64")():
            assert jnp.asarray(np.float64(1)).dtype == jnp.float32

    def test_pvary_marks_a_value_as_different_on_each_device(self, mesh_of):
        def f(x):
            return get("jax.lax.pvary")(jnp.zeros(()), "data") + x[0]

        out = jax.shard_map(
            lambda x: f(x)[None],
            mesh=mesh_of(2),
            in_specs=P("data"),
            out_specs=P("data"),
        )(jnp.arange(2.0))
        assert out.tolist() == [0, 1]


@pytest.mark.usefixtures("era")
class TestNamesThatStayGone:
    @pytest.mark.parametrize(
        ("name", "advice"),
        {
            "jax.soft_pmap": "per_device",
            "jax.xmap": "jax.shard_map",
            "jax.experimental.maps.xmap": "jax.shard_map",
            "jax.lib.xla_bridge.anything": "jax.extend.backend",
            "jax.core.axis_frame": "jax.lax.axis_size",
            "jax.spmd_mode": "jax.jit",
            "jax.sharding.PositionalSharding": "NamedSharding",
            "jax.custom_transforms": "jax.custom_vjp",
            "flax.optim.Momentum": "optax",
        }.items(),
    )
    def test_reading_one_says_what_to_write(self, name, advice):
        owner, _, attribute = name.rpartition(".")
        with pytest.raises(AttributeError, match=f"{name} is gone.*{advice}"):
            getattr(get(owner), attribute)
        assert not hasattr(get(owner), attribute)

    @pytest.mark.parametrize(
        ("line", "advice"),
        {
            "import flax.nn": "flax.linen",
            "from flax import nn": "flax.linen",
            "from flax.optim import Adam": "optax",
            "from flax.deprecated import nn": "flax.linen",
            "from jax.experimental.maps import xmap": "jax.shard_map",
            "from jax.experimental import host_callback": "jax.pure_callback",
            "import jax.experimental.loops": "jax.lax.scan",
            "from jax import mask": "mask in the batch",
        }.items(),
    )
    def test_importing_one_says_what_to_write(self, line, advice):
        with pytest.raises(ImportError, match=f"is gone.*{advice}"):
            exec(line)

    def test_code_that_is_ready_for_it_goes_its_other_way(self):
        try:
            from flax import nn  # pyright: ignore
        except ImportError:
            nn = None
        assert nn is None
        assert getattr(jax, "soft_pmap", None) is None

    def test_a_name_that_never_was_is_unknown_as_ever(self):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            get("jax.nonsense")
        with pytest.raises(ModuleNotFoundError, match="jax.nonsense"):
            importlib.import_module("jax.nonsense")


class TestGoingAgain:
    def snapshot(self):
        modules = [m for m in sys.modules if m.split(".")[0] in ("jax", "flax")]
        names = {m: dict(vars(sys.modules[m])) for m in modules}
        arrays = {c: dict(vars(c)) for c in jax.Array.__subclasses__()}
        return names, arrays, list(sys.meta_path), dict(vars(jax.config))

    def test_nothing_is_left(self):
        with compat.installed():  # imports what it patches, once and for all
            pass
        names, arrays, finders, config = self.snapshot()
        with compat.installed(era_random=True):
            assert "jax.experimental.maps" in sys.modules
        now, arrays_now, finders_now, config_now = self.snapshot()
        assert set(now) == set(names)
        for module in names:
            assert now[module] == names[module], module
        assert arrays_now == arrays
        assert finders_now == finders
        assert config_now == config

    def test_a_second_install_is_the_first(self):
        compat.install()
        try:
            patched = jax.config.update
            compat.install()
            with compat.installed():
                assert jax.config.update is patched
            assert hasattr(jax, "tree_map")
        finally:
            compat.uninstall()
        assert not hasattr(jax, "tree_map")
        compat.uninstall()

    def test_an_error_inside_leaves_nothing(self):
        with pytest.raises(KeyError), compat.installed():
            raise KeyError
        assert not hasattr(jax, "device_put_sharded")


class TestRandomNumbersOfTheEra:
    def test_are_drawn_where_asked_for(self):
        with compat.installed(era_random=True):
            drawn = jax.random.normal(jax.random.PRNGKey(0), (1,))
        np.testing.assert_allclose(drawn, FIRST_NORMAL_OF_THE_ERA, rtol=1e-6)

    def test_are_not_drawn_otherwise(self):
        with compat.installed():
            drawn = jax.random.normal(jax.random.PRNGKey(0), (1,))
        assert abs(float(drawn[0]) - FIRST_NORMAL_OF_THE_ERA) > 0.1

    def test_can_be_asked_for_later(self):
        with compat.installed():
            compat.install(era_random=True)
            drawn = jax.random.normal(jax.random.PRNGKey(0), (1,))
        np.testing.assert_allclose(drawn, FIRST_NORMAL_OF_THE_ERA, rtol=1e-6)
        assert jax.config.jax_threefry_partitionable is True


STARTS_NO_BACKEND = """
import jax
from lockstep import compat
compat.install()
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
assert jax.device_count() == 3
from jax.config import config
from jax import device_put_replicated, tree_map, replicate
"""


def test_installing_starts_no_backend():
    done = run_python("-W", "error", "-c", STARTS_NO_BACKEND)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["x.device()", "jax.pmap(lambda v: v)(x).device()"])
def test_an_error_about_the_device_of_an_array_says_what_to_write(place, tmp_path):
    script = tmp_path / "old.py"
    script.write_text(f"import jax\nx = jax.numpy.ones(2)\n{place}\n")
    run = "run", "--simulate", "2", "--compat", str(script)
    done = run_lockstep(*run, cwd=tmp_path)
    assert done.returncode == 1
    assert "write x.device for an array on one device, x.devices()" in done.stderr


def test_other_errors_are_left_as_they_are():
    for error in TypeError("'int' object is not callable"), ValueError("no"):
        explain(error)
        assert not getattr(error, "__notes__", None)
