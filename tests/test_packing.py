"""Small leaves in vectors: what goes where, and back again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.packing import SMALL_BYTES, Packed, Packing, pack, unpack
from lockstep.tree import first_difference


def tree_of():
    return {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": (jnp.ones(2, jnp.bfloat16), None, jnp.float32(7)),
        "c": jnp.arange(4, dtype=jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "large": jnp.ones(SMALL_BYTES // 4),
        "n": jnp.arange(3),
    }


def test_leaves_of_one_dtype_share_a_vector_and_large_ones_stay():
    tree = tree_of()
    packing = Packing.of(tree)
    packed = packing.pack(tree)
    assert packing.slots == ((0, 2, 4), (1, 3), (5,), (6,)) and packing.joined == 5
    floats, sixteen, large, alone = packed.parts
    np.testing.assert_array_equal(floats, [0, 1, 2, 3, 4, 5, 7])
    np.testing.assert_array_equal(np.asarray(sixteen, float), [1, 1, 0, 1, 2, 3])
    assert large is tree["large"] and alone is tree["n"]  # no copy


@pytest.mark.parametrize("traced", [False, True])
def test_unpacking_gives_the_tree_again(traced):
    tree = tree_of()
    packing = Packing.of(tree)
    run = jax.jit if traced else lambda fn: fn
    again = run(lambda packed: packed.unpack())(run(packing.pack)(tree))
    assert first_difference(tree, again) is None
    jax.tree.map(np.testing.assert_array_equal, tree, again)


def test_a_leaf_at_the_limit_is_large():
    below, at = jnp.ones(15, jnp.float16), jnp.ones(16, jnp.float16)
    assert Packing.of([below, at, below], small_bytes=32).slots == ((0, 2), (1,))


def test_all_trees_of_the_same_structure_are_packed_alike():
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    moments = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = ({"mu": moments, "count": jnp.zeros((), int)}, [params["b"]], "name")
    packed = pack(state, Packing.of(params))
    assert isinstance(packed[0]["mu"], Packed)
    assert packed[0]["mu"].parts[0].dtype == jnp.bfloat16
    assert packed[1:] == state[1:]
    jax.tree.map(np.testing.assert_array_equal, unpack(packed)[0], state[0])


def test_the_gradient_of_a_packed_tree_is_packed():
    params = {"w": jnp.ones((2, 2)), "b": jnp.full(2, 3.0)}
    packed = Packing.of(params).pack(params)

    def loss(packed):
        tree = packed.unpack()
        return jnp.sum(tree["w"]) + jnp.sum(tree["b"] ** 2)

    grads = jax.grad(loss)(packed)
    np.testing.assert_array_equal(grads.parts[0], [6, 6, 1, 1, 1, 1])


def test_devices_that_differ_stay_different(mesh_of):
    """Packing must not hide what check_replicas looks for."""
    from lockstep.replicas import ReplicaMismatch, check_replicas

    mesh = mesh_of(4)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = [jnp.full(2, float(i)) for i in range(4)]
    copies = [jax.device_put(r, d) for r, d in zip(rows, mesh.devices, strict=True)]
    odd = jax.make_array_from_single_device_arrays((2,), where, copies)
    tree = {"w": jax.device_put(jnp.ones(2), where), "odd": odd}
    again = Packing.of(tree).pack(tree).unpack()
    with pytest.raises(ReplicaMismatch, match="odd"):
        check_replicas(again)
