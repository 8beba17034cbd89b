"""A change that is one number times another is found, and nothing else."""

import numpy as np
import pytest

from lockstep.debug.comparing.factors import factor_of
from lockstep.debug.comparing.verdicts import Leaf

RNG = np.random.default_rng(0)
OLD, GRAD = RNG.normal(size=(2, 50))


def leaf(change, old=OLD, factor=4):
    """A leaf that the step changes by a function of its old value and a gradient."""
    new = [np.float32(change(old, g)) for g in (GRAD, factor * GRAD)]
    return Leaf("state", *new, old=np.float32(old))


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda old, g: old - 0.1 * g, 4),  # SGD
        (lambda old, g: old - 0.1 * (g + 0.01 * old), 4),  # with weight decay
        (lambda old, g: 0.9 * old + 0.1 * g, 4),  # a first moment
        (lambda old, g: 0.999 * old + 0.001 * g**2, 16),  # a second moment
    ],
)
def test_the_factor_is_found_whatever_the_optimizer_does_with_it(change, factor):
    assert factor_of(leaf(change)) == pytest.approx(factor, rel=0.02)
    assert factor_of(leaf(change, np.zeros(50))) == pytest.approx(factor, rel=0.01)


def test_no_factor_where_there_is_none():
    assert factor_of(leaf(lambda old, g: np.sign(g), OLD)) is None  # equal
    other = Leaf("state", np.float32(GRAD), np.float32(RNG.normal(size=50)))
    assert factor_of(other) is None
    assert factor_of(Leaf("n", np.int32([3]), np.int32([12]))) is None
    assert factor_of(Leaf("x", np.float32([0]), np.float32([1]))) is None
    assert factor_of(Leaf("x", np.float32([1]), np.float32([np.nan]))) is None


def test_a_single_number():
    assert factor_of(Leaf("x", np.float32(1.5), np.float32(6))) == pytest.approx(4)
