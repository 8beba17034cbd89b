"""`Mean`: merged as sums, divided once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.metrics import Mean, compute, flatten, is_mean, merge, to_means


def test_mean_of_unequal_parts_is_not_the_mean_of_means():
    batches = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0]]  # 8 of 10 are right, L2
    total = Mean(0, 0)
    for batch in batches:
        total = total + Mean.of(jnp.array(batch, bool))
    assert float(total) == 0.8
    assert total.total.dtype == total.count.dtype == jnp.int32


def test_weights_reach_the_first_axes():
    values = jnp.arange(6.0).reshape(2, 3)
    rows = Mean.of(values, jnp.array([1.0, 0.0]))
    assert (float(rows.total), float(rows.count)) == (3.0, 3.0)
    tokens = Mean.of(values, jnp.array([[1, 0, 0], [0, 0, 1]], bool))
    assert (float(tokens.total), int(tokens.count)) == (5.0, 2)
    square = Mean.of(jnp.ones((2, 2)) * jnp.array([[1.0], [3.0]]), jnp.array([0, 1]))
    assert float(square) == 3.0  # by rows, where broadcasting would take columns
    with pytest.raises(ValueError, match=r"\(3,\) do not fit .* \(2, 3\)"):
        Mean.of(values, jnp.ones(3))


def test_values_without_weight_do_not_count_even_when_they_are_nan():
    mean = Mean.of(jnp.array([1.0, jnp.nan, 4.0]), jnp.array([1.0, 0.0, 2.0]))
    assert float(mean) == 3.0
    assert np.isnan(float(Mean.of(jnp.array([1.0, jnp.nan]))))


def test_the_mean_of_nothing_is_zero():
    for nothing in (Mean(0, 0), Mean(0.0, 0.0), Mean.of(jnp.ones(3), jnp.zeros(3))):
        assert float(nothing) == 0.0
    assert float(Mean(jnp.float32(0), jnp.float32(0)).compute()) == 0.0


def test_16_bit_values_are_summed_in_float32():
    values = jnp.full(4096, 1.0, jnp.bfloat16)  # in bfloat16 the sum stops at 256
    assert Mean.of(values).total == 4096
    assert Mean.of(values).total.dtype == jnp.float32


def test_large_integers_do_not_wrap_around():
    assert Mean.of(jnp.full(8, 2**30, jnp.int32)).total == 2.0**33


def test_no_gradient_flows_through_the_weights():
    def count(w):
        return Mean.of(jnp.ones(3), jnp.full(3, w)).count

    assert jax.grad(count)(2.0) == 0.0


def test_it_is_a_tree_of_two_leaves_through_jit_and_scan():
    _, stacked = jax.lax.scan(lambda c, x: (c, Mean(x, 1)), 0, jnp.arange(3.0))
    assert is_mean(stacked) and stacked.total.shape == (3,)
    assert float(jax.jit(Mean.merge)(Mean(1.0, 1), Mean(4.0, 4))) == 1.0


def test_the_host_counts_in_integers_and_float64():
    big = Mean(np.int32(2**31 - 1), np.int32(2**31 - 1))
    total = merge({"n": big}, {"n": big})["n"]
    assert total.count == 2**32 - 2 and isinstance(total.count, int)

    tiny = {"x": Mean(np.float32(1e-8), 0)}
    added = merge({"x": Mean(np.float32(1.0), 1)}, tiny)["x"]
    assert added.total == 1.0 + float(np.float32(1e-8)) != 1.0


def test_plain_numbers_weigh_their_rows():
    first = to_means({"a": jnp.float32(1.0)}, rows=4)
    second = to_means({"a": 0.5}, rows=1)
    assert compute(merge(first, second)) == {"a": 0.9}


def test_nested_names_are_joined():
    metrics = {"loss": Mean(1, 2), "top": {"1": 0.5, "5": Mean(3, 4)}}
    assert compute(metrics) == {"loss": 0.5, "top/1": 0.5, "top/5": 0.75}
    assert set(flatten(metrics)) == {"loss", "top/1", "top/5"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (jnp.ones(3), r"float32 of shape \(3,\)"),
        ("high", "str of shape"),
        (None, "NoneType of shape"),
        (1j, "complex of shape"),
        (jax.random.key(0), r"key<fry> of shape \(\)"),
        (Mean(jnp.ones(2), 1), r"float32 of shape \(2,\)"),
    ],
)
def test_a_metric_that_is_no_number_is_named(value, found):
    with pytest.raises(ValueError, match=rf"metric 'top/1' is {found}.*not one number"):
        compute({"top": {"1": value}})


def test_other_names_in_the_next_step_are_named():
    with pytest.raises(ValueError, match="one of two steps only: accuracy"):
        merge({"loss": 1.0}, {"loss": 1.0, "accuracy": 0.5})


def test_reading_a_mean_inside_jit_says_so():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda m: float(m))(Mean(1.0, 1))


def test_it_prints_as_a_number():
    assert f"{Mean(1, 3):.3f}" == "0.333"
    assert str(Mean(1, 3)) == "Mean(total=1, count=3)"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1000, 1000), st.integers(0, 5)), min_size=1, max_size=24
    ),
    st.data(),
)
def test_any_split_merges_to_the_whole(pairs, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(pairs)), max_size=4)))
    total = {"m": Mean(0, 0)}
    for begin, end in zip([0, *cuts], [*cuts, len(pairs)], strict=True):
        part = pairs[begin:end]
        weighted = sum(value * weight for value, weight in part)
        total = merge(total, {"m": Mean(weighted, sum(weight for _, weight in part))})
    weights = sum(weight for _, weight in pairs)
    want = sum(value * weight for value, weight in pairs) / weights if weights else 0.0
    assert compute(total)["m"] == want
