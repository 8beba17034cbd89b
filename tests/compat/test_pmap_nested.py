"""A `pmap` inside a `pmap`: one mesh of two axes, and what cannot be nested."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from lockstep import notices
from lockstep.compat import pmap

X = np.arange(4 * 2 * 3 * 5, dtype=np.float32).reshape(4, 2, 3, 5)


def nest(fun, **inner):
    return pmap(pmap(fun, "j", **inner), "i")


class TestPlacement:
    def test_every_device_holds_one_entry_of_both_axes(self):
        out = nest(lambda x: x + 1)(X)
        assert out.sharding.spec == P("i", "j")
        assert dict(out.sharding.mesh.shape) == {"i": 4, "j": 2}
        assert [s.data.shape for s in out.addressable_shards] == [(1, 1, 3, 5)] * 8
        np.testing.assert_array_equal(out, X + 1)

    def test_every_device_multiplies_its_own_matrices_alone(self):
        lowered = nest(lambda x: x @ x.T).lower(X)
        assert "mhlo.num_partitions = 8 " in lowered.as_text()
        text = lowered.compile().as_text()
        (shape,) = set(re.findall(r"= (f32\[[\d,]*\])[^\n]* dot\(", text))
        assert shape in ("f32[1,3,3]", "f32[3,3]"), "the matrices of one device"
        assert not re.search("all-gather|all-reduce|all-to-all|permute", text)

    def test_a_sum_over_the_inner_axis_stays_within_its_group(self):
        text = nest(lambda x: lax.psum(x, "j")).lower(X).compile().as_text()
        groups = re.findall(r"all-reduce\([^\n]*replica_groups=(\S+?),? ", text)
        assert groups and "all-gather" not in text
        assert all("[4,2]" in g or "{0,1}" in g for g in groups)

    def test_the_state_of_a_loop_stays(self):
        traces = 0

        def step(x):
            nonlocal traces
            traces += 1
            return x + lax.pmean(x, ("i", "j"))

        f = nest(step)
        x = f(X)
        met = traces  # a second trace, when the inner axis has become known
        for _ in range(3):
            x = f(x)
        assert traces <= met + 1 and f.moves.calls == 0
        assert x.sharding.spec == P("i", "j")


class TestMeaning:
    def test_three_deep(self):
        x = np.arange(8.0).reshape(2, 2, 2)
        f = pmap(pmap(pmap(lambda x: lax.psum(x, ("i", "k")), "k"), "j"), "i")
        out = f(x)
        want = np.broadcast_to(x.sum((0, 2), keepdims=True), x.shape)
        np.testing.assert_array_equal(out, want)
        assert [s.data.shape for s in out.addressable_shards] == [(1, 1, 1)] * 8

    def test_one_name_for_both_and_no_names(self):
        inner = pmap(lambda x: lax.psum(x, "i"), "i")
        out = pmap(inner, "i")(X)
        want = np.broadcast_to(X.sum(1, keepdims=True), X.shape)
        np.testing.assert_array_equal(out, want)
        np.testing.assert_array_equal(pmap(pmap(jnp.sin))(X), jnp.sin(X))

    def test_axes_results_statics_and_keywords_of_the_inner_map(self):
        inner = pmap(
            lambda n, x, *, y: (x * n + y, y),
            in_axes=(None, 1),
            out_axes=(1, 0),
            static_broadcasted_argnums=0,
        )
        out, ys = pmap(lambda x, y: inner(3, x, y=y))(X.swapaxes(1, 2), X[:, :, 0, 0])
        want = X * 3 + X[:, :, :1, :1]
        np.testing.assert_array_equal(out, want.swapaxes(1, 2))
        np.testing.assert_array_equal(ys, X[:, :, 0, 0])

    def test_closures_and_gradients(self):
        @lambda f: pmap(f, "i")
        def outer(x):
            scale = jnp.sin(x).sum()
            inner = pmap(lambda z: jnp.tanh(scale * z) * lax.axis_index("i"), "j")
            return jax.grad(lambda z: inner(z).sum())(x)

        def want(i, x):
            scale = jnp.sin(x).sum()
            return jax.grad(lambda z: (jnp.tanh(scale * z) * i).sum())(x)

        x = X[..., 0, 0] / 100
        expected = [want(i, row) for i, row in enumerate(x)]
        np.testing.assert_allclose(outer(x), expected, rtol=1e-5)

    def test_groups_of_a_collective(self):
        f = pmap(
            pmap(lambda x: lax.psum(x, "j", axis_index_groups=[[0, 1], [2, 3]]), "j"),
            "i",
        )
        x = np.arange(8.0).reshape(2, 4)
        np.testing.assert_array_equal(f(x), [[1, 1, 5, 5], [9, 9, 13, 13]])
        assert len(f(x).sharding.device_set) == 8

    def test_the_inner_map_beside_other_work_and_under_jit(self):
        inner = pmap(lambda x: x - lax.pmean(x, "j"), "j")
        f = pmap(lambda x: jax.jit(inner)(x) + lax.pmax(x, "i"), "i")
        want = X - X.mean(1, keepdims=True) + X.max(0)
        np.testing.assert_allclose(f(X), want, rtol=1e-6)

    def test_random_numbers_differ_on_all_devices(self):
        keys = jax.random.split(jax.random.key(0), (4, 2))
        draws = np.asarray(pmap(pmap(jax.random.normal))(keys))
        assert len(set(draws.ravel())) == 8

    def test_another_size_inside_gives_the_same_numbers_and_is_told(self, caplog):
        notices.reset()
        inner = pmap(lambda x: x - lax.pmean(x, "j"), "j")
        f = pmap(lambda a, b: (inner(a), inner(b)), "i")
        a, b = X[:, :, 0, 0], X[:, 0, :, 0]
        out = f(a, b)
        np.testing.assert_allclose(out[0], a - a.mean(1, keepdims=True), rtol=1e-6)
        np.testing.assert_allclose(out[1], b - b.mean(1, keepdims=True), rtol=1e-6)
        assert "inner pmap over 3 rows runs unsplit" in caplog.text

    def test_lists_of_devices_of_the_outer_map_serve_both(self):
        devices = jax.devices()[::-1]
        out = pmap(pmap(lambda x: x), devices=devices)(X)
        assert list(out.sharding.mesh.devices.flat) == devices


class TestErrors:
    def test_more_devices_than_there_are(self):
        with pytest.raises(ValueError, match="requires 20 logical devices, but only 8"):
            pmap(pmap(lambda x: x))(np.ones((4, 5)))

    def test_more_devices_than_were_named(self):
        f = pmap(pmap(lambda x: x), devices=jax.devices()[:4])
        with pytest.raises(ValueError, match="requires 8 local devices .* only 4"):
            f(X)

    def test_devices_of_the_inner_map(self):
        f = pmap(pmap(lambda x: x, devices=jax.devices()[:2]))
        with pytest.raises(ValueError, match="Nested pmap with explicit devices"):
            f(X)

    def test_inside_a_shard_map_of_somebody_else(self, mesh_of):
        f = jax.shard_map(
            pmap(lambda x: x), mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data")
        )
        with pytest.raises(ValueError, match="inside a shard_map that is not"):
            f(np.ones(8))

    def test_leaves_of_the_inner_map_that_do_not_agree(self):
        f = pmap(lambda x: pmap(lambda a, b: a)(x, x[0]))
        with pytest.raises(ValueError, match=r"b: leading axis 3, expected 2"):
            f(X)

    def test_what_has_no_rule_says_so_itself(self):
        def inner(x):
            raise NotImplementedError("mine")

        with pytest.raises(NotImplementedError, match="mine"):
            pmap(lambda x: pmap(lambda z: inner(x))(x))(X)

    def test_an_error_leaves_nothing_behind(self):
        def broken(x):
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            nest(broken)(X)
        np.testing.assert_array_equal(nest(lambda x: x)(X), X)
        with pytest.raises(NameError, match="unbound axis name: j"):
            pmap(lambda x: lax.psum(x, "j"), "i")(X)
