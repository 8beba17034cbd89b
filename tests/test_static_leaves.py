import jax
import jax.numpy as jnp

from lockstep.parallel.static_leaves import unwrap, wrap


def test_static_leaves_travel_in_the_structure_and_come_back():
    values = {"w": jnp.ones(2), "train": True, "act": jax.nn.relu, "none": None}
    wrapped = wrap(values)
    assert len(jax.tree.leaves(wrapped)) == 1
    assert unwrap(wrapped) == values


def test_a_new_value_is_a_new_structure():
    same = jax.tree.structure(wrap({"train": True}))
    assert jax.tree.structure(wrap({"train": True})) == same
    assert jax.tree.structure(wrap({"train": False})) != same


def test_jit_takes_a_wrapped_tree_and_retraces_only_for_new_values():
    traced = []

    @jax.jit
    def f(values):
        values = unwrap(values)
        traced.append(values["scale"])
        return values["x"] * (2.0 if values["scale"] else 1.0)

    x = jnp.ones(())
    assert f(wrap({"x": x, "scale": True})) == 2.0
    assert f(wrap({"x": x, "scale": False})) == 1.0
    assert f(wrap({"x": x, "scale": True})) == 2.0
    assert traced == [True, False]
