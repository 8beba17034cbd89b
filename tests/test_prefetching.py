"""`prefetch`: in order, ahead by so much, and no thread left behind."""

import logging
import threading
import traceback
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fresh_process import run_python
from jax.sharding import PartitionSpec

from lockstep.data import handover
from lockstep.data.prefetching import prefetch
from lockstep.parallel import parallelize
from lockstep.placement import MaskedBatch

LONG_S = 30  # an upper bound on hangs


def numbered(count, rows=8):
    """Host batches whose every value is their number."""
    return [{"x": np.full((rows, 2), i, np.float32)} for i in range(count)]


def numbers(batches):
    return [int(batch["x"][0, 0]) for batch in batches]


def threads():
    return [t for t in threading.enumerate() if t.name == "lockstep-prefetch"]


class Source:
    """A generator function whose end can be seen."""

    def __init__(self, count, rows=8):
        self.count, self.rows, self.closed = count, rows, 0

    def __iter__(self):
        try:
            yield from numbered(self.count, self.rows)
        finally:
            self.closed += 1


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_batches_have_the_same_shape_and_values_on_any_number_of_devices(
    mesh_of, devices
):
    batches = numbered(3)
    placed = list(prefetch(batches, mesh_of(devices)))
    for batch, host in zip(placed, batches, strict=True):
        assert batch["x"].shape == (8, 2)
        assert batch["x"].sharding.spec == PartitionSpec("data")
        assert len(batch["x"].addressable_shards) == devices
        np.testing.assert_array_equal(batch["x"], host["x"])
    assert not threads()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_reads_size_batches_ahead_and_no_more(mesh_of, size):
    asked, ahead, far = 0, [], threading.Event()

    def source():
        for i, batch in enumerate(numbered(12)):
            ahead.append(i + 1 - asked)
            if ahead[-1] == size:
                far.set()
            yield batch

    iterator = iter(prefetch(source(), mesh_of(2), size=size))
    for i in range(12):
        asked += 1
        assert numbers([next(iterator)]) == [i]
        if i == 0:
            assert far.wait(LONG_S)  # while this loop does nothing
    assert max(ahead) == size


def test_an_error_comes_after_the_batches_before_it_with_its_traceback(mesh_of):
    def broken():
        yield from numbered(3)
        raise KeyError("no such file")

    iterator = iter(prefetch(broken(), mesh_of(2), size=5))
    assert numbers([next(iterator) for _ in range(3)]) == [0, 1, 2]
    with pytest.raises(KeyError, match="no such file") as caught:
        next(iterator)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken" in frames
    assert next(iterator, "end") == "end"
    assert not threads()


def test_an_error_of_placing_comes_in_order_too(mesh_of):
    batches = [*numbered(2), *numbered(1, rows=3)]
    iterator = iter(prefetch(batches, mesh_of(2)))
    assert numbers([next(iterator), next(iterator)]) == [0, 1]
    with pytest.raises(ValueError, match=r"batch\['x'\] has 3 rows"):
        next(iterator)
    assert not threads()


def test_a_stop_iteration_in_placing_is_not_taken_for_the_end():
    def place_batch(batch):
        return next(iter(()))

    step = SimpleNamespace(place_batch=place_batch, remainder="error")
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(prefetch(numbered(2), step))


def leave_by_break(batches):
    for _ in batches:
        break


def leave_by_error(batches):
    with pytest.raises(ZeroDivisionError):
        for _ in batches:
            _ = 1 / 0


def leave_by_closing_a_generator(batches):
    def loop():
        yield from batches

    generator = loop()
    next(generator)
    generator.close()


def leave_by_close(batches):
    iterator = iter(batches)
    next(iterator)
    iterator.close()
    assert next(iterator, "end") == "end"


def leave_at_the_end(batches):
    assert numbers(batches) == list(range(20))


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_error,
        leave_by_closing_a_generator,
        leave_by_close,
        leave_at_the_end,
    ],
)
def test_leaving_the_loop_ends_the_thread_and_closes_the_source(mesh_of, leave):
    source = Source(20)
    batches = prefetch(source, mesh_of(2))
    for passes in (1, 2):  # and it works again for the next epoch
        leave(batches)
        assert not threads()
        assert source.closed == passes


def test_a_source_is_read_by_one_thread(mesh_of):
    readers = set()

    def source():
        for batch in numbered(10):
            readers.add(threading.current_thread())
            yield batch
        readers.add(threading.current_thread())

    assert numbers(prefetch(source(), mesh_of(2))) == list(range(10))
    assert [t.name for t in readers] == ["lockstep-prefetch"]


def test_an_iterator_is_read_once_and_says_so(mesh_of):
    batches = prefetch(iter(numbered(3)), mesh_of(2))
    assert numbers(batches) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="can be read once"):
        iter(batches)


def test_a_newer_loop_closes_the_older_one_which_says_so(mesh_of):
    source = Source(20)
    batches = prefetch(source, mesh_of(2))
    older = iter(batches)
    next(older)
    newer = iter(batches)
    assert source.closed == 1
    assert numbers([next(newer)]) == [0]
    with pytest.raises(RuntimeError, match="newer loop"):
        next(older)
    newer.close()
    assert not threads()


def test_a_busy_source_does_not_hold_up_the_loop_that_leaves(
    mesh_of, monkeypatch, caplog
):
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.01)
    busy, go_on = threading.Event(), threading.Event()

    def source():
        yield numbered(1)[0]
        busy.set()
        go_on.wait(LONG_S)
        yield numbered(1)[0]

    iterator = iter(prefetch(source(), mesh_of(2)))
    next(iterator)
    assert busy.wait(LONG_S)
    iterator.close()
    (thread,) = threads()
    assert "busy with one batch" in caplog.text
    go_on.set()
    thread.join(LONG_S)
    assert not threads()


def test_a_loop_that_was_left_holds_no_batch(mesh_of):
    def waiting():
        return [x for x in jax.live_arrays() if x.shape == (8, 77)]

    last = threading.Event()

    def source():
        for i in range(9):
            if i == 4:
                last.set()
            yield {"x": np.zeros((8, 77), np.float32)}

    iterator = iter(prefetch(source(), mesh_of(2), size=4))
    batch = next(iterator)
    assert last.wait(LONG_S)
    assert len(waiting()) >= 4
    iterator.close()
    assert [x is batch["x"] for x in waiting()] == [True]


def test_an_error_while_leaving_is_logged(mesh_of, caplog):
    def source():
        try:
            yield from numbered(9)
        finally:
            raise OSError("the disk is gone")

    with caplog.at_level(logging.WARNING):
        leave_by_break(prefetch(source(), mesh_of(2)))
    assert "while the loop was being left" in caplog.text
    assert "the disk is gone" in caplog.text


def test_a_program_that_ends_in_the_middle_of_a_loop_ends():
    result = run_python(
        "-c",
        "import itertools, numpy, lockstep as ls\n"
        "ones = itertools.repeat({'x': numpy.ones(8, 'f4')})\n"
        "iterator = iter(ls.prefetch(ones, ls.make_mesh()))\n"
        "print(next(iterator)['x'].sum())",
        JAX_PLATFORMS="cpu",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "8.0\n", "")


class Counting:
    """An iterator that knows its position."""

    def __init__(self, count):
        self.position, self.count = 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.count:
            raise StopIteration
        self.position += 1
        return numbered(self.position)[-1]

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def test_the_position_counts_what_the_loop_was_given(mesh_of):
    source = Counting(6)
    iterator = iter(prefetch(source, mesh_of(2), size=3))
    iterator.set_state({"position": 1})
    assert iterator.get_state() == {"position": 1}
    for position in (2, 3):
        next(iterator)
        assert iterator.get_state() == {"position": position}
    assert numbers(iterator) == [3, 4, 5]
    assert iterator.get_state() == {"position": 6} == source.get_state()
    with pytest.raises(RuntimeError, match="fresh iter"):
        iterator.set_state({"position": 0})


def test_a_source_without_a_position_has_none(mesh_of):
    iterator = iter(prefetch(numbered(2), mesh_of(2)))
    assert iterator.get_state() is None
    next(iterator)
    assert iterator.get_state() is None
    with pytest.raises(TypeError, match="list_iterator, has no set_state"):
        iter(prefetch(numbered(2), mesh_of(2))).set_state({})


def test_batches_can_be_left_out_before_the_first(mesh_of):
    iterator = iter(prefetch(numbered(4), mesh_of(2)))
    iterator.skip(2)
    assert numbers(iterator) == [2, 3]
    with pytest.raises(RuntimeError, match="skip after the first batch"):
        iterator.skip(1)
    with pytest.raises(ValueError, match="had read 5 batches, .* ends after 4"):
        iter(prefetch(numbered(4), mesh_of(2))).skip(5)


def test_a_source_says_whether_it_knows_its_place(mesh_of):
    assert iter(prefetch(Counting(2), mesh_of(2))).knows_its_place
    assert not iter(prefetch(numbered(2), mesh_of(2))).knows_its_place


def test_a_limit_leaves_an_iterator_open_and_unread_beyond(mesh_of):
    source = iter(Source(9))
    mesh = mesh_of(2)
    first = prefetch(source, mesh, limit=4, size=3)
    assert numbers(first) == [0, 1, 2, 3]
    assert numbers(prefetch(source, mesh, limit=2)) == [4, 5]
    assert numbers(prefetch(source, mesh)) == [6, 7, 8]
    assert len(prefetch(numbered(9), mesh, limit=4)) == 4
    assert not threads()


def test_a_step_places_its_batches(mesh_of):
    step = parallelize(
        lambda state, batch: (state, batch["x"].sum()), mesh_of(4), remainder="pad"
    )
    batches = prefetch(numbered(2, rows=6), step, remainder="pad")
    assert len(batches) == 2
    for batch in batches:
        assert isinstance(batch, MaskedBatch)
        assert batch.data["x"].shape == (8, 2)
        np.testing.assert_array_equal(batch.mask, [1] * 6 + [0] * 2)
    with pytest.raises(ValueError, match="remainder='drop' and the step has .*'pad'"):
        prefetch([], step, remainder="drop")


def test_any_number_of_batches_without_a_whole_row_per_device_is_left_out(mesh_of):
    batches = [
        b for pair in zip(numbered(5, 3), numbered(5), strict=True) for b in pair
    ]
    placed = prefetch(batches, mesh_of(4), size=1, remainder="drop")
    assert numbers(placed) == [0, 1, 2, 3, 4]
    assert not threads()


def test_a_batch_of_which_nothing_is_left_is_left_out(mesh_of):
    batches = [*numbered(2), *numbered(1, rows=2)]
    placed = list(prefetch(batches, mesh_of(4), remainder="drop"))
    assert [len(batch["x"]) for batch in placed] == [8, 8]


def test_double_precision_holds_in_the_thread(mesh_of, float64):
    (batch,) = prefetch([{"x": np.ones(4)}], mesh_of(2))
    assert batch["x"].dtype == np.float64


def test_torch_tensors_become_arrays(mesh_of):
    class Tensor:
        """What lockstep asks of a torch tensor."""

        dtype, shape = "torch.float32", (4,)

        def detach(self):
            return self

        def cpu(self):
            return self

        def numpy(self):
            return np.arange(4, dtype=np.float32)

    Tensor.__module__ = "torch"
    (batch,) = prefetch([{"x": Tensor()}], mesh_of(2))
    assert isinstance(batch["x"], jax.Array)
    np.testing.assert_array_equal(batch["x"], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size=0"),
        ({"size": 1.5}, TypeError, "size=1.5 is a float: give an int"),
        ({"size": True}, TypeError, "size=True is a bool"),
        ({"size": None}, TypeError, "size=None is a NoneType"),
        ({"limit": 0}, ValueError, "limit=0"),
        ({"limit": "8"}, TypeError, "limit='8' is a str"),
        ({"batches": {"x": np.ones(8)}}, TypeError, r"one dict: give \[batch\]"),
        ({"batches": 3}, TypeError, "one int"),
        ({"where": "gpu"}, TypeError, "where is a str"),
    ],
)
def test_wrong_arguments(mesh_of, arguments, error, message):
    defaults = {"batches": numbered(1), "where": mesh_of(2)}
    with pytest.raises(error, match=message):
        prefetch(**(defaults | arguments))
