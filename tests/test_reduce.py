"""Sums over devices: dtypes, one collective, and the axis checked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lockstep.reduce import axis_size, psum_tree


def mapped(fn, mesh, check_vma=False):
    return jax.jit(
        jax.shard_map(
            fn, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma
        )
    )


def tree_of(n):
    return {
        "w": jnp.arange(n * 6.0).reshape(n, 2, 3),
        "b": (jnp.ones((n, 1), jnp.bfloat16), jnp.ones((n, 4), jnp.float16)),
        "n": jnp.arange(n, dtype=jnp.int32),
    }


@pytest.mark.parametrize("n", [1, 4, 8])
def test_the_sum_over_devices_in_the_trees_own_types(n, mesh_of):
    tree = tree_of(n)
    total = mapped(lambda t: psum_tree(t, "data"), mesh_of(n))(tree)
    for got, leaf in zip(jax.tree.leaves(total), jax.tree.leaves(tree), strict=True):
        assert got.dtype == leaf.dtype
        np.testing.assert_array_equal(
            np.asarray(got, np.float64), np.asarray(leaf, np.float64).sum(0)[None]
        )


def test_16_bit_sums_are_made_in_32_bits(mesh_of):
    # In bfloat16, 256 + 1 is 256 at every addition: the sum would stop there.
    parts = jnp.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)
    total = mapped(lambda x: psum_tree(x, "data"), mesh_of(8))(parts)
    assert total.dtype == jnp.bfloat16
    assert float(total[0]) == float(jnp.bfloat16(263)) > 260


def test_floats_of_all_widths_share_one_all_reduce(mesh_of):
    tree = {name: leaf for name, leaf in tree_of(8).items() if name != "n"}
    step = mapped(lambda t: psum_tree(t, "data"), mesh_of(8))
    text = step.lower(tree).compile().as_text()
    assert len(re.findall(r"= \(?\S.* all-reduce\(", text)) == 1


def test_axis_size_counts_the_devices(mesh_of):
    seen = []
    step = mapped(lambda x: seen.append(axis_size("data")) or x.sum(), mesh_of(4))
    step(jnp.ones(4))
    assert seen == [4]


def test_a_missing_axis_is_an_error_that_shows_per_device():
    with pytest.raises(RuntimeError, match="'dta', which is not there.*per_device"):
        axis_size("dta")


def test_check_vma_is_refused_because_gradients_would_be_summed_twice(mesh_of):
    step = mapped(lambda x: x.sum() * axis_size("data"), mesh_of(4), check_vma=True)
    with pytest.raises(RuntimeError, match="4 x too large.*check_vma=False"):
        step(jnp.ones(4))
