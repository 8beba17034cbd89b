"""`data.batches`: every row once an epoch, in an order that is found again."""

import json
import threading

import grain
import jax
import numpy as np
import pytest

from lockstep.data import Batches, batches, prefetch
from lockstep.data.batch_plan import BatchPlan
from lockstep.data.row_sources import row_source


def ids(one_pass):
    return [np.asarray(batch["id"]).tolist() for batch in one_pass]


def data(rows=20, size=8, **options):
    return batches({"id": np.arange(rows)}, global_batch_size=size, **options)


def data_of_process(process, processes, *, rows=21, size=8, seed=5):
    """What `batches` makes on one of several processes with 2 devices each."""
    plan = BatchPlan(size, processes, 2, first_shard=2 * process)
    return Batches(row_source({"id": np.arange(rows)}), plan, seed, 1, None)


def test_rows_come_in_order_without_a_seed():
    batches = data()
    first = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert ids(batches) == ids(batches) == first
    assert len(batches) == 3


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    shuffled = data(rows=100, seed=0)
    epochs = [sum(ids(shuffled), []) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(range(100)) not in epochs


def test_the_order_is_a_function_of_seed_and_epoch():
    one, same, other = data(seed=3), data(seed=3), data(seed=4)
    for _ in range(2):
        order = ids(one)
        assert order == ids(same)
        assert order != ids(other)
    # Written down, so that no later version trains in another order unnoticed.
    assert ids(data(rows=8, seed=0)) == [[6, 3, 4, 0, 5, 1, 2, 7]]


def test_rows_of_one_array_stay_with_those_of_another():
    arrays = {"x": np.arange(20) * 10, "y": np.arange(20)}
    for batch in batches(arrays, global_batch_size=8, seed=1):
        np.testing.assert_array_equal(batch["x"], batch["y"] * 10)


@pytest.mark.parametrize(("remainder", "sizes"), [(None, [8, 8, 4]), ("drop", [8, 8])])
def test_the_short_last_batch(remainder, sizes):
    batches = data(seed=0, remainder=remainder)
    assert [len(batch) for batch in ids(batches)] == sizes
    assert len(batches) == len(sizes)


def test_what_remainder_refuses():
    assert len(data(rows=16, remainder="error")) == 2
    with pytest.raises(ValueError, match="20 rows make 2 batches of 8 and leave 4"):
        data(remainder="error")
    with pytest.raises(ValueError, match="5 rows do not fill one batch of 8"):
        data(rows=5, remainder="drop")
    with pytest.raises(ValueError, match="give them to parallelize"):
        data(remainder="pad")


@pytest.mark.parametrize(
    ("options", "message"), [({"epochs": 0}, "epochs=0"), ({"seed": -1}, "seed=-1")]
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        data(**options)


def test_a_pass_may_have_several_epochs():
    single, double = data(seed=2), data(seed=2, epochs=2)
    assert len(double) == 6
    for _ in range(2):
        assert ids(double) == ids(single) + ids(single)


def test_it_shows_its_plan():
    shown = batches({"id": np.zeros(1437)}, per_device_batch_size=32)
    plan = "global 256 = 1 process x 8 devices x 32 rows"
    assert str(shown.plan) == plan
    assert repr(shown) == f"Batches(1,437 rows, 6 batches, {plan})"


def joined(passes):
    """The next global batch, from the passes of all processes."""
    return np.concatenate([next(one_pass)["id"] for one_pass in passes]).tolist()


class TestPosition:
    """Resuming: the same rows in the same order, and none twice."""

    @pytest.mark.parametrize("epoch", [0, 2])
    @pytest.mark.parametrize("given", [0, 1, 2, 3])
    def test_half_and_the_rest_are_the_whole(self, epoch, given):
        straight = data(seed=7)
        whole = [ids(straight) for _ in range(epoch + 2)]
        stopped = data(seed=7)
        for _ in range(epoch):
            ids(stopped)
        iterator = iter(stopped)
        half = ids(next(iterator) for _ in range(given))
        state = json.loads(json.dumps(iterator.get_state()))
        assert state == {
            "epoch": epoch,
            "row": min(8 * given, 20),
            "rows": 20,
            "seed": 7,
        }
        resumed = data(seed=7)
        rest = iter(resumed)
        rest.set_state(state)
        assert half + ids(rest) == whole[epoch]
        assert next(rest, "end") == "end"
        assert ids(resumed) == whole[epoch + 1]

    def test_a_pass_of_several_epochs_ends_where_it_would_have(self):
        whole = ids(data(seed=7, epochs=3))
        iterator = iter(data(seed=7, epochs=3))
        iterator.set_state({"epoch": 1, "row": 8, "rows": 20, "seed": 7})
        assert ids(iterator) == whole[4:]

    def test_another_batch_size_goes_on_at_the_same_row(self):
        order = sum(ids(data(seed=7)), [])
        iterator = iter(data(seed=7, size=16))
        iterator.set_state({"epoch": 0, "row": 8, "rows": 20, "seed": 7})
        assert ids(iterator) == [order[8:]]

    @pytest.mark.parametrize(("name", "value"), [("rows", 21), ("seed", None)])
    def test_a_position_in_another_order_is_refused(self, name, value):
        state = data(seed=7).__iter__().get_state() | {name: value}
        with pytest.raises(ValueError, match=f"{name}={value}, and this data has"):
            iter(data(seed=7)).set_state(state)

    def test_prefetch_counts_what_the_loop_was_given(self, mesh_of):
        iterator = iter(prefetch(data(rows=64, seed=1), mesh_of(4), size=4))
        for row in (8, 16, 24):
            next(iterator)
            assert iterator.get_state()["row"] == row
        rest = iter(data(rows=64, seed=1))
        rest.set_state(iterator.get_state())
        assert ids(iterator) == ids(rest)

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
    def test_another_number_of_processes_goes_on_with_the_same_rows(
        self, before, after
    ):
        straight = ids(data_of_process(0, 1))
        passes = [iter(data_of_process(p, before)) for p in range(before)]
        assert joined(passes) == straight[0]
        states = [one_pass.get_state() for one_pass in passes]
        assert states == [{"epoch": 0, "row": 8, "rows": 21, "seed": 5}] * before
        resumed = [iter(data_of_process(p, after)) for p in range(after)]
        for one_pass in resumed:
            one_pass.set_state(states[0])
        assert [joined(resumed), joined(resumed)] == straight[1:]


def test_processes_cut_the_same_global_batches():
    whole = ids(data_of_process(0, 1))
    parts = [ids(data_of_process(p, 2)) for p in range(2)]
    assert [sum(part, []) for part in zip(*parts, strict=True)] == whole
    assert sorted(sum(whole, [])) == list(range(21))


class Squares:
    """Elements made when they are asked for, which notes who asks."""

    def __init__(self):
        self.threads = set()

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.threads.add(threading.current_thread())
        return {"id": i, "square": i * i}


def test_elements_come_in_the_order_of_arrays_and_from_threads():
    source = Squares()
    elements = batches(source, global_batch_size=8, seed=6)
    arrays = data(rows=40, seed=6)
    for _ in range(2):
        assert ids(elements) == ids(arrays)
    for thread in source.threads:
        assert thread.name.startswith("grain")
        thread.join(30)
        assert not thread.is_alive()


def test_leaving_a_pass_over_elements_ends_its_threads(mesh_of):
    source = Squares()
    for batch in prefetch(batches(source, global_batch_size=8), mesh_of(2)):
        assert np.asarray(batch["square"]).tolist() == [i * i for i in range(8)]
        break
    for thread in source.threads:
        thread.join(30)
        assert not thread.is_alive()


def test_an_error_in_an_element_comes_after_the_batches_before_it():
    class Broken(Squares):
        def __getitem__(self, i):
            if i == 17:
                raise OSError("row 17 cannot be read")
            return {"id": i}

    iterator = iter(batches(Broken(), global_batch_size=8))
    assert ids([next(iterator), next(iterator)]) == [[*range(8)], [*range(8, 16)]]
    with pytest.raises(OSError, match="row 17"):
        next(iterator)


def test_a_grain_dataset_is_a_source():
    source = grain.MapDataset.source(np.arange(10)).map(lambda i: {"id": i + 100})
    order = sum(ids(batches(source, global_batch_size=8, seed=0)), [])
    assert sorted(order) == list(range(100, 110))


def test_a_position_at_an_epochs_end_goes_on_with_the_next_epoch_of_the_pass():
    iterator = iter(data(seed=1, epochs=2))
    first = ids(next(iterator) for _ in range(3))
    assert iterator.get_state() == {"epoch": 0, "row": 20, "rows": 20, "seed": 1}
    resumed = iter(data(seed=1, epochs=2))
    resumed.set_state(iterator.get_state())
    assert first + ids(resumed) == ids(data(seed=1, epochs=2))


def test_batches_train_on_any_mesh(mesh_of):
    for devices in (1, 4):
        rows = batches(
            np.arange(16.0, dtype="f4"), per_device_batch_size=4, mesh=mesh_of(devices)
        )
        totals = [float(batch.sum()) for batch in prefetch(rows, mesh_of(devices))]
        assert sum(totals) == 120
        assert len(totals) == 4 // devices
    assert jax.device_count() == 8
