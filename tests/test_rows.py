"""Rows of a batch: masks merged, microbatches with a stride."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.placement import MaskedBatch
from lockstep.step.rows import open_batch, split_microbatches

X = np.arange(8.0).reshape(4, 2)
PADDING = np.array([1, 1, 1, 0], np.float32)


def test_a_batch_without_a_mask_counts_every_row():
    for batch in (X, (X, X), {"x": X}):
        rows = open_batch(batch)
        assert rows.data is batch
        assert (rows.count, rows.weight, rows.mask) == (4, 4, None)


def test_a_masked_batch_of_any_tree():
    rows = open_batch(MaskedBatch((X, X), PADDING))
    assert isinstance(rows.data, tuple)
    assert float(rows.weight) == 3.0 and rows.count == 4


def test_a_loss_finds_the_mask_in_a_dict_and_the_batch_stays_as_it_was():
    batch = {"x": X}
    rows = open_batch(MaskedBatch(batch, PADDING))
    np.testing.assert_array_equal(rows.data["mask"], PADDING)
    assert set(batch) == {"x"}
    assert set(open_batch(MaskedBatch(batch, PADDING), "real").data) == {"x", "real"}
    assert open_batch(MaskedBatch(batch, PADDING), None).data is batch


def test_the_users_mask_and_the_padding_are_multiplied():
    mine = np.array([1, 0, 1, 1], bool)
    rows = open_batch(MaskedBatch({"x": X, "mask": mine}, PADDING))
    np.testing.assert_array_equal(rows.mask, [1, 0, 1, 0])
    np.testing.assert_array_equal(rows.data["mask"], [1, 0, 1, 0])
    assert not rows.finer

    tokens = np.array([[1, 0], [1, 1], [0, 0], [1, 1]])
    rows = open_batch(MaskedBatch({"x": X, "mask": tokens}, PADDING))
    np.testing.assert_array_equal(rows.mask, PADDING)  # of the rows
    np.testing.assert_array_equal(rows.data["mask"], [[1, 0], [1, 1], [0, 0], [0, 0]])
    assert rows.finer


def test_weights_in_16_bits_are_summed_in_32():
    rows = open_batch({"x": np.ones(4096), "mask": jnp.ones(4096, jnp.bfloat16)})
    assert float(rows.weight) == 4096.0


def test_a_mask_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"batch\['mask'\] has no rows.*mask=None"):
        open_batch({"x": X, "mask": np.float32(1.0)})
    with pytest.raises(ValueError, match=r"batch\['mask'\] has 3"):
        open_batch({"x": X, "mask": np.ones(3)})


@pytest.mark.parametrize(("k", "rows"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_microbatches_hold_every_row_once_with_a_stride(k, rows):
    batch = {"id": np.arange(k * rows), "x": np.ones((k * rows, 2)), "rate": 0.5}
    leaves, join = split_microbatches(MaskedBatch(batch, np.ones(k * rows)), k)
    parts = [join([leaf[j] for leaf in leaves]) for j in range(k)]
    for j, part in enumerate(parts):
        np.testing.assert_array_equal(part.data["id"], np.arange(j, k * rows, k))
        assert part.data["x"].shape == (rows, 2) and part.mask.shape == (rows,)
        assert part.data["rate"] == 0.5


def test_keys_a_row_are_split_too():
    leaves, join = split_microbatches(
        {"key": jax.random.split(jax.random.key(0), 4)}, 2
    )
    assert join([leaf[1] for leaf in leaves])["key"].shape == (2,)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match=r"2 rows here.*accumulate=4.*use 4 rows"):
        split_microbatches(X[:2], 4)
