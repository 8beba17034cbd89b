"""Equal, rounding, no signal or wrong, from numbers alone."""

import numpy as np
import pytest

from lockstep.debug.comparing.verdicts import Leaf, align, with_moments


def leaf(want, got, dtype=np.float32, path="state[0]['w']", **known):
    want, got = np.asarray(want, dtype), np.asarray(got, dtype)
    return Leaf(path, want, got, **known)


@pytest.mark.parametrize(
    ("want", "got", "verdict"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], "equal"),
        ([1.0, 2.0], [1.0, 2.0 + 5e-7], "rounding"),
        ([1.0, 2.0], [1.0, 2.0 + 5e-6], "wrong"),
        ([1.0, 2.0], [1.0, np.nan], "wrong"),
        ([1.0, np.inf], [1.0, -np.inf], "wrong"),
        ([[1.0, 2.0]], [[1.0, 2.0], [1.0, 3.0]], "per device"),
    ],
)
def test_values(want, got, verdict):
    assert leaf(want, got).verdict == verdict


def test_integers_are_equal_or_wrong():
    assert leaf([3], [3], np.int32).verdict == "equal"
    assert leaf([10**8], [10**8 + 1], np.int32).verdict == "wrong"


def test_an_update_is_held_against_itself_and_not_against_the_parameter():
    """A step of 1e-4 that is 4 times too large moves a parameter by 3e-4 only."""
    old = np.float32([1.0])
    assert leaf([1.0001], [1.0004], old=old).verdict == "wrong"
    assert leaf([1.0001], [1.0001 + 1e-7], old=old).verdict == "rounding"  # stored
    assert leaf([1.0], [1.01], old=old).verdict == "wrong"  # moved on N alone


def test_noise_widens_what_counts_as_rounding():
    assert leaf([1.0], [1.001]).verdict == "wrong"
    assert leaf([1.0], [1.001], noise=2e-4).verdict == "rounding"
    assert leaf([1.0], [1.001], noise=2e-5).verdict == "wrong"
    assert leaf([1.0], [1.9], noise=0.5).verdict == "no signal"
    assert leaf([1.0], [9.0], noise=0.5).verdict == "wrong"
    assert leaf([1.0], [1.9], redraw=0.5).verdict == "random"
    assert leaf([1.0], [4.0], redraw=0.5).verdict == "wrong"


def test_the_tolerance_can_be_set_and_follows_the_type():
    assert leaf([1.0], [1.001], tolerance=1e-2).verdict == "rounding"
    assert leaf([1.0], [1 + 1e-9], np.float64).verdict == "wrong"
    assert leaf([1.0], [1 + 1e-3], np.float16).verdict == "rounding"
    assert leaf([1.0], [1.1], np.float16).verdict == "wrong"


def test_different_copies_are_wrong_whatever_the_first_one_holds():
    assert leaf([1.0], [1.0], copies_differ=True).verdict == "wrong"


def test_a_parameter_whose_moment_has_no_signal():
    old = np.zeros(1, np.float32)
    moment = leaf([1e-9], [2e-9], old=old, path="state[1].mu['w']", noise=1e-9)
    other = leaf([1e-9], [2e-9], old=old, path="state[1].mu['v']", noise=1e-9)
    parameter = leaf([0.1], [-0.1], old=old)
    assert [x.verdict for x in with_moments([parameter, moment])] == ["no signal"] * 2
    assert with_moments([parameter, other])[0].verdict == "wrong"


@pytest.mark.parametrize(
    ("want", "got", "counts", "shape"),
    [
        ((1, 8, 3), (4, 2, 3), (1, 4), (1, 8, 3)),  # rows
        ((1, 7), (4, 2), (1, 4), (1, 7)),  # rows with padding
        ((2, 4), (4, 2), (2, 4), (2, 4)),  # from two devices to four
        ((10, 3), (12, 3), (1, 4), (10, 3)),  # rows with padding, global view
        ((), (), (1, 4), ()),
        ((1, 5), (4, 6), (1, 4), (4, 6)),  # something else
    ],
)
def test_rows_are_brought_together(want, got, counts, shape):
    values = np.arange(np.prod(got, dtype=int)).reshape(got)
    found = align(np.zeros(want), values, counts)
    assert found.shape == shape
    assert (found.ravel() == values.ravel()[: found.size]).all()


def test_a_value_that_all_devices_agree_on_is_compared():
    assert align(np.zeros((1, 3)), np.ones((4, 3)), (1, 4)).shape == (1, 3)
    differing = np.arange(12.0).reshape(4, 3)
    assert align(np.zeros((1, 3)), differing, (1, 4)).shape == (4, 3)
