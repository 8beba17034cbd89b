"""Names that are gone: found however they are imported, and not where code is ready."""

import pytest
from marked_lines import assert_marked, findings_in


def found(text):
    assert_marked("gone-name", text)


class TestGoneNames:
    def test_attributes_imports_and_aliases(self):
        found("""
            from jax import tree_map, lax as low  # <-
            from jax.config import config  # <-
            import jax.config  # <-
            import jax.lib.xla_bridge  # <-
            import jax.experimental.optimizers as opt  # <-
            import jax as j, jax.random as jr

            a = jax.device_put_replicated(x, jax.local_devices())  # <-
            b = j.tree_leaves(x)  # <-
            def f(key: jr.KeyArray) -> jnp.DeviceArray:  # <-
                return tree_map(abs, key)
            put = jax.device_put_sharded  # <-
            c = put(x, devices)
            d = opt.adam(1)
            e = jax.experimental.maps.Mesh(devices, "x")  # <-
        """)

    def test_flax_and_optax(self):
        found("""
            from flax import optim, nn as old_nn  # <-
            import flax
            a = flax.optim.Adam(1e-3)  # <-
            b = optax.additive_weight_decay(0.1)  # <-
            c = nn.Dense(3), jax_utils.replicate(x), optax.adam(1e-3)
        """)

    @pytest.mark.parametrize(
        ("line", "advice"),
        [
            ("jax.tree_map(f, x)", "renamed to jax.tree.map"),
            ("jax.device_put_replicated(x, d)", "lockstep.replicate"),
            ("jax.ops.index_update(x, 0, 1)", "write x.at[index].set(y)"),
            (
                "jax.experimental.optimizers.adam(1)",
                "example_libraries.optimizers.adam",
            ),
            ("jax.experimental.host_callback.id_tap(f, x)", "jax.pure_callback"),
            ("jax.core.axis_frame('i')", "jax.lax.axis_size"),
        ],
    )
    def test_the_text_says_what_to_write(self, line, advice):
        (finding,) = findings_in(f"import jax\n{line}", "gone-name")
        assert advice in finding.text
        assert finding.level == "error"

    def test_names_of_today_are_left_alone(self):
        found("""
            from jax.experimental.shard_map import shard_map
            from jax.sharding import Mesh, PartitionSpec
            from flax import nnx
            import jax.tree_util as jtu
            jax.tree.map(f, x); jtu.tree_map(f, x); jax.tree_util.tree_leaves(x)
            jax.config.update("jax_enable_x64", True)
            jax.device_put(x, jax.devices()[0]); jax.random.key(0); jax.Array
        """)

    def test_other_things_of_these_names_are_left_alone(self):
        found("""
            import torch.utils._pytree as pytree
            from mylib import tree_map, optim
            pytree.tree_map(f, x); tree_map(f, x); optim.Adam(1)

            def f(jax):
                return jax.tree_map(1)

            class tree:
                tree_map = 3

            tree.tree_map, self.tree_map, x["tree_map"], "jax.tree_map"
        """)


class TestCodeThatIsReady:
    @pytest.mark.parametrize(
        "text",
        [
            "try:\n    from jax import tree_map\nexcept ImportError:\n    f = None",
            "try:\n    f = jax.tree_map\nexcept AttributeError:\n    f = jax.tree.map",
            "try:\n    f = jax.tree_map\nexcept (AttributeError, KeyError):\n    pass",
            "try:\n    import jax.experimental.maps\nexcept:\n    pass",
            'if hasattr(jax, "tree_map"):\n    f = jax.tree_map\nelse:\n    f = 1',
            'f = jax.tree_map if hasattr(jax, "tree_map") else jax.tree.map',
            'if jax.__version__ < "0.4":\n    f = jax.tree_map',
            "jax.tree_map = jax.tree.map\nf = jax.tree_map",
        ],
    )
    def test_is_left_alone(self, text):
        found(text)

    def test_a_try_for_something_else_does_not_count(self):
        found("""
            try:
                a = jax.tree_map(f, x)  # <-
                b = 1
                c = 2
                d = 3
            except Exception:
                report()
            try:
                a = jax.tree_map(f, x)  # <-
            except KeyboardInterrupt:
                pass
        """)

    def test_a_module_that_installs_the_names_has_them(self):
        found("""
            from lockstep import compat
            compat.install()
            jax.tree_map(f, jax.device_put_replicated(x, d))
            jax.soft_pmap(f)  # <-
        """)


class TestAttributesKeywordsOptions:
    def test_buffers_of_an_array(self):
        assert_marked(
            "gone-attribute", "order = [b.device() for b in x.device_buffers]  # <-"
        )

    def test_buffers_of_something_else(self):
        text = "import torch\nb = x.device_buffers\n"
        assert not findings_in(text, "gone-attribute")

    def test_the_device_of_an_array_is_no_method(self):
        assert_marked(
            "gone-attribute",
            """
            here = x.device()  # <-
            there = params["w"].device() == jax.devices()[1]  # <-
            x.device; x.devices(); jax.local_devices(); x.to_device(x.device)
            """,
        )
        own = "import jax\nclass Pool:\n    def device(self): ...\nPool().device()\n"
        assert not findings_in(own, "gone-attribute")
        assert not findings_in("import torch\nt.device()\n", "gone-attribute")

    def test_to_py(self):
        assert_marked("gone-attribute", "host = x.device_buffer.to_py()  # <-")
        assert_marked("gone-attribute", "host = x.to_py()  # <-")

    def test_keywords_of_clip(self):
        assert_marked(
            "gone-keyword",
            """
            jnp.clip(x, a_min=0)  # <-
            jax.numpy.clip(x, 0, a_max=1)  # <-
            jnp.clip(x, 0, 1); jnp.clip(x, min=0); np.clip(x, a_min=0, a_max=1)
            """,
        )

    def test_keywords_of_pjit(self):
        assert_marked(
            "gone-keyword",
            """
            from jax.experimental.pjit import pjit
            f = pjit(abs, in_axis_resources=None)  # <-
            g = pjit(abs, out_axis_resources=None)  # <-
            h = pjit(abs, in_shardings=None), jax.jit(abs, out_shardings=None)
            """,
        )

    def test_options(self):
        assert_marked(
            "gone-option",
            """
            jax.config.update("jax_array", True)  # <-
            jax.config.update("jax_enable_x64", True)
            other.config.update("jax_array", True)
            """,
        )


class TestMisspeltNames:
    @pytest.mark.parametrize(
        ("name", "meant"),
        {
            "jax.device_put_replicate": "jax.device_put_replicated",
            "jax.device_put_shard": "jax.device_put_sharded",
            "jax.lax.pmeans": "jax.lax.pmean",
            "jax.tree_utils.tree_map": "jax.tree_util",
            "jax.random.spilt": "jax.random.split",
        }.items(),
    )
    def test_say_what_was_meant(self, name, meant):
        (finding,) = findings_in(f"import jax\n{name}(x)", "unknown-name")
        assert finding.text.endswith(f"perhaps {meant}")
        assert finding.level == "error"

    @pytest.mark.parametrize(
        "name",
        [
            "jax.numpy.newaxis",
            "jax.tree.leaves",
            "jax.lax.pmean",
            "jax.config.jax_enable_x64",
            "jax.experimental.pallas.load",
            "jax.experimental.multihost_utils.sync_global_devices",
            "jax.lax._private_thing",
            "jax.nothing_like_any_other_name",
            "jax.host_id",
        ],
    )
    def test_are_not_seen_in_names_that_are_right_or_strange(self, name):
        assert not findings_in(f"import jax\n{name}", "unknown-name")

    def test_nor_where_code_is_ready(self):
        text = "try:\n    jax.device_put_replicate\nexcept AttributeError:\n    pass"
        assert not findings_in(f"import jax\n{text}", "unknown-name")


def test_old_names_are_notes():
    assert_marked(
        "old-name",
        """
        from jax.experimental.shard_map import shard_map  # <-
        n = jax.host_count()  # <-
        m = jax.process_count()
        """,
    )
