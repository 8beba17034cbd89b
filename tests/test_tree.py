import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import tree


@pytest.mark.parametrize(
    ("leaf", "static"),
    [
        (True, True),
        ("adam", True),
        (jnp.tanh, True),
        (1, False),
        (1.5, False),
        (2j, False),
        (np.float32(1), False),
        (np.True_, False),
        (np.zeros(3), False),
        (jax.ShapeDtypeStruct((3,), jnp.float32), False),
    ],
)
def test_flags_names_and_functions_are_static(leaf, static):
    assert tree.is_static(leaf) is static


def test_paths_are_those_a_person_would_write():
    named = tree.named_leaves({"a": [1, {"b": 2}], "none": None}, "state")
    assert named == [("state['a'][0]", 1), ("state['a'][1]['b']", 2)]


def test_bytes_count_each_array_once():
    values = {"w": np.zeros((3, 4), np.float32), "n": np.int64(1), "name": "x"}
    assert tree.nbytes(values) == 3 * 4 * 4 + 8


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ({"w": np.zeros(3), "b": 1}, "state['b'] is new"),
        ({}, "state['w'] is missing"),
        ({"w": np.zeros(4)}, "state['w'] was float64[3] and is now float64[4]"),
        ({"w": np.zeros(3, int)}, "state['w'] was float64[3] and is now int64[3]"),
    ],
)
def test_the_first_difference_is_named(got, text):
    assert tree.first_difference({"w": np.zeros(3)}, got, "state") == text


def test_other_containers_with_equal_leaves_differ():
    assert "other containers" in tree.first_difference((1,), [1], "state")
    assert tree.first_difference({"a": 1}, {"a": 2}) is None


def test_keys_are_recognised_and_raw_keys_are_not():
    assert tree.is_key(jax.random.key(0))
    assert not tree.is_key(jax.random.PRNGKey(0))


def test_tensors_become_numpy_without_a_copy():
    """Stand-ins with the interface of torch and TensorFlow tensors."""
    data = np.arange(3.0)

    class Tensor:
        dtype, shape = "torch.float64", (3,)

        def detach(self):
            return self

        def cpu(self):
            return self

        def numpy(self):
            return data

    Tensor.__module__ = "torch"
    assert tree.as_host(Tensor()) is data
    eager = types.new_class("EagerTensor")
    eager.__module__ = "tensorflow.python.framework.ops"
    eager.numpy = lambda self: data
    assert tree.as_host(eager()) is data
    assert tree.as_host("text") == "text"
