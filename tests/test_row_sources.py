"""Rows by number from arrays and from elements."""

import dataclasses

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.data.row_sources import ArrayRows, ElementRows, row_source

ROWS = np.array([3, 0, 2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    x: np.ndarray
    y: np.ndarray


def test_any_tree_of_arrays_has_rows():
    source = row_source(
        {"a": (np.arange(4), None), "b": Pair(np.eye(4), jnp.arange(4.0)), "n": 7}
    )
    batch = source.take(ROWS, epoch=0)
    assert len(source) == 4
    np.testing.assert_array_equal(batch["a"][0], ROWS)
    assert batch["a"][1] is None
    np.testing.assert_array_equal(batch["b"].x, np.eye(4)[ROWS])
    assert type(batch["b"].y) is np.ndarray
    assert batch["n"] == 7


def test_a_batch_is_a_copy():
    rows = np.arange(4)
    batch = row_source(rows).take(np.arange(4), epoch=0)
    batch += 1
    np.testing.assert_array_equal(rows, np.arange(4))


def test_memory_mapped_rows_are_read_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(4, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArrayRows({"x": mapped})
    kept = jax.tree.leaves(vars(source)["_arrays"])[0]
    assert np.shares_memory(kept, mapped)  # nothing was read
    batch = source.take(ROWS, epoch=0)["x"]
    assert type(batch) is np.ndarray
    assert batch.flags.owndata
    np.testing.assert_array_equal(batch, mapped[ROWS])


class Stored:
    """An array on a disk, as h5py and zarr have them."""

    shape, dtype = (4, 2), np.dtype("float32")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ({"x": np.ones(4), "y": np.ones(3)}, ValueError, r"\['y'\] has 3 rows and"),
        ({"x": np.array(["a", "b"])}, ValueError, r"source\['x'\] is text"),
        ({"x": Stored()}, TypeError, r"source\['x'\] is a Stored: give NumPy"),
        ([1, 2, 3], ValueError, "no array with rows"),
        (iter([np.ones(3)]), TypeError, "no rows by number"),
    ],
)
def test_what_has_no_rows_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        row_source(source)


class Squares:
    """Elements made when they are asked for."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"i": i, "square": np.full(2, i * i, np.float32)}


def test_elements_are_stacked():
    batch = row_source(Squares()).take(ROWS, epoch=0)
    np.testing.assert_array_equal(batch["i"], ROWS)
    np.testing.assert_array_equal(batch["square"], [[9, 9], [0, 0], [4, 4]])


def test_random_transforms_of_grain_draw_anew_in_each_epoch():
    def noisy(i, rng):
        return i, rng.integers(1_000_000)

    source = row_source(grain.MapDataset.range(5).seed(1).random_map(noisy))
    first, again, second = (source.take(ROWS, epoch) for epoch in (0, 0, 1))
    for batch in (first, again, second):
        np.testing.assert_array_equal(batch[0], ROWS)
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.any(first[1] == second[1])


def test_elements_that_do_not_stack_are_named():
    class Ragged(Squares):
        def __getitem__(self, i):
            return {"x": np.zeros(i)}

    with pytest.raises(ValueError, match=r"rows 3 and 0 .*row\['x'\] was float64\[3\]"):
        row_source(Ragged()).take(ROWS, epoch=0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (grain.MapDataset.range(5).repeat(), "leave .repeat"),
        (grain.MapDataset.source([]), "0 rows"),
    ],
)
def test_sources_without_a_number_of_rows(source, message):
    with pytest.raises(ValueError, match=message):
        ElementRows(source)


def test_a_filtered_source_is_refused_where_a_row_is_missing():
    source = row_source(grain.MapDataset.range(5).filter(lambda i: i != 2))
    with pytest.raises(ValueError, match="row 2 of the source is None"):
        source.take(ROWS, epoch=0)
