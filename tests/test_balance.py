"""Which batches weigh the shards unequally, and the same batches evened out."""

import numpy as np

from lockstep.debug.comparing.balance import equal_shards, shards, uneven_weights
from lockstep.debug.comparing.trials import read_call
from lockstep.parallel import parallelize


def found(batch, **options):
    step = parallelize(lambda w, b: w, **options)
    return list(uneven_weights(step, read_call(step, (0.0, batch), {}), 4))


def test_a_mask_is_found_before_what_looks_like_one():
    mask = np.array([1, 1, 1, 0, 0, 0, 1, 0], np.float32)
    labels = np.array([0, 0, 1, 0, 1, 1, 0, 0])
    first, second = found({"labels": labels, "loss_mask": mask, "x": mask / 3})
    assert (first.weights, first.unit, first.is_mask) == ((2, 1, 0, 1), "rows", True)
    batch = first.evened.args[1]
    np.testing.assert_array_equal(batch["loss_mask"], np.ones(8))
    np.testing.assert_array_equal(batch["labels"], labels)
    assert second.weights == (0, 1, 2, 0) and not second.is_mask


def test_padding_tokens_are_replaced_by_real_ones():
    tokens = np.array([[5, 0], [5, 6], [7, 8], [5, 0]])
    (only,) = found({"tokens": tokens})
    assert (only.weights, only.unit) == ((1, 2, 2, 1), "entries")
    assert only.evened.args[1]["tokens"].tolist() == [[5, 5], [5, 6], [7, 8], [5, 5]]


def test_lengths_and_ignored_labels():
    lengths = found({"lengths": np.array([4, 3, 2, 4])})[0]
    assert lengths.weights == (4, 3, 2, 4)
    np.testing.assert_array_equal(lengths.evened.args[1]["lengths"], [4] * 4)
    (ignored,) = found({"y": np.array([1, -100, 2, 3])})
    assert ignored.weights == (1, 0, 1, 1)


def test_even_weights_and_real_numbers_are_not_in_question():
    even = np.array([1, 0, 1, 0, 0, 1, 1, 0], np.float32)
    assert found({"mask": even, "x": np.linspace(0, 1, 8)}) == []


def test_rows_that_padding_splits_unevenly():
    (padded,) = found(np.linspace(0.1, 1, 10), remainder="pad")
    assert padded.weights == (3, 3, 3, 1) and padded.is_mask
    batch = padded.evened.args[1]
    assert len(batch) == 12 and (batch[10:] == batch[:2]).all()


def test_the_first_shard_on_every_device():
    step = parallelize(lambda w, b: w)
    call = read_call(step, (0.0, {"x": np.arange(8)}), {})
    assert [len(x) for x in shards(step, np.arange(8), 4)] == [2] * 4
    rows = equal_shards(step, call, 4).args[1]["x"]
    assert rows.tolist() == [0, 1] * 4
