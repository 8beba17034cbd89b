"""Numbers from the host do not change the compiled step with their kind."""

import jax.numpy as jnp
import numpy as np
import pytest

import lockstep as ls

X = np.ones((8, 2), np.float32)


def scaled(w, x, rate):
    return w - rate * x.mean(0), None


def run(step, w, *rates):
    for rate in rates:
        w, _ = step(w, X, rate)
    return np.asarray(w)


@pytest.mark.parametrize("first", [0.5, np.float32(0.5), np.float64(0.5)])
def test_floats_of_all_kinds_are_one_program(first, mesh_of):
    step = ls.parallelize(scaled, mesh_of(2))
    others = (0.25, np.float32(0.25), np.float64(0.25), 1, np.int32(1), np.int64(1))
    w = run(step, np.zeros(2, np.float32), first, *others)
    assert w.tolist() == [-4.25, -4.25]
    assert step.compiles.count == 1


def test_whole_numbers_of_all_kinds_are_one_program(mesh_of):
    step = ls.parallelize(scaled, mesh_of(2))
    run(step, np.zeros(2, np.float32), 1, np.int32(2), np.int64(3), np.uint8(4), 5)
    assert step.compiles.count == 1


def test_a_fraction_after_a_whole_number_is_another_program(mesh_of, caplog):
    step = ls.parallelize(scaled, mesh_of(2))
    w = run(step, np.zeros(2, np.float32), 1, 0.5)
    assert w.tolist() == [-1.5, -1.5]
    assert "rate weak int32 -> weak float" in caplog.text


def test_a_number_that_does_not_fit_is_another_program(mesh_of):
    step = ls.parallelize(scaled, mesh_of(2))
    w = run(step, np.zeros(2, np.float32), np.uint8(1), 1000)
    assert w.tolist() == [-1001, -1001]
    assert step.compiles.count == 2


def test_the_state_keeps_its_dtype(mesh_of):
    step = ls.parallelize(lambda w, x, rate: (w - rate * w, None), mesh_of(2))
    w = run(step, jnp.ones(2, jnp.bfloat16), 0.5, np.float32(0.5))
    assert w.dtype == jnp.bfloat16 and w.tolist() == [0.25, 0.25]


def test_inside_a_tree_and_by_name(mesh_of):
    def step(w, x, *, options):
        return w - options["rate"] * x.mean(0), None

    run = ls.parallelize(step, mesh_of(2))
    w, _ = run(np.zeros(2, np.float32), X, options={"rate": 0.5, "name": "a"})
    run(w, X, options={"rate": np.float32(1), "name": "a"})
    assert run.compiles.count == 1


def test_flags_stay_flags(mesh_of):
    def step(w, x, double):
        return w + (2 if double else 1) * x.mean(0), None

    run = ls.parallelize(step, mesh_of(2))
    w, _ = run(np.zeros(2, np.float32), X, True)
    w, _ = run(w, X, False)
    assert w.tolist() == [3, 3]
