"""Batch sizes in words, and each process's part of a batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batch_plan import BatchPlan, plan_batches


@pytest.mark.parametrize(
    ("sizes", "devices", "text"),
    [
        ((256, None), 4, "global 256 = 1 process x 4 devices x 64 rows"),
        ((None, 64), 4, "global 256 = 1 process x 4 devices x 64 rows"),
        ((7, None), 1, "global 7 = 1 process x 1 device x 7 rows"),
        ((8, None), 8, "global 8 = 1 process x 8 devices x 1 row"),
        ((2, None), 4, "global 2: fewer rows than 1 process x 4 devices"),
    ],
)
def test_the_plan_says_where_the_rows_go(mesh_of, sizes, devices, text):
    assert str(plan_batches(*sizes, mesh_of(devices))) == text


def test_all_devices_are_the_default():
    assert str(plan_batches(None, 2)) == "global 16 = 1 process x 8 devices x 2 rows"


def test_a_model_axis_takes_no_rows(mesh_of):
    plan = plan_batches(None, 16, mesh_of(8, {"model": 2, "data": 4}))
    assert str(plan) == "global 64 = 1 process x 4 shards of 2 devices x 16 rows"


def test_rows_that_do_not_divide_name_the_nearest_sizes(mesh_of):
    with pytest.raises(ValueError, match="32 does not divide over 3 devices: use") as e:
        plan_batches(32, None, mesh_of(3))
    assert "global_batch_size=30 or 33" in str(e.value)
    assert "per_device_batch_size=10 or 11" in str(e.value)


@pytest.mark.parametrize("sizes", [(None, None), (32, 8)])
def test_exactly_one_size_is_given(sizes):
    with pytest.raises(ValueError, match="exactly one") as caught:
        plan_batches(*sizes)
    assert f"global_batch_size={sizes[0]}" in str(caught.value)
    assert f"per_device_batch_size={sizes[1]}" in str(caught.value)


@pytest.mark.parametrize("sizes", [(0, None), (None, -4)])
def test_a_size_is_positive(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        plan_batches(*sizes)


def test_a_mesh_without_a_data_axis_is_refused(mesh_of):
    with pytest.raises(ValueError, match="no axis 'data'"):
        plan_batches(8, None, mesh_of(8, {"model": 2, "stage": 4}))


def mesh_of_processes(owners, axes=("data",)):
    """A mesh as far as the plan looks at it; this process is process 0."""
    devices = [SimpleNamespace(process_index=p) for p in np.ravel(owners)]
    shaped = np.array(devices, object).reshape(np.shape(owners))
    return SimpleNamespace(
        axis_names=axes,
        devices=shaped,
        shape=dict(zip(axes, shaped.shape, strict=True)),
    )


def test_processes_share_the_batch():
    plan = plan_batches(32, None, mesh_of_processes([0, 0, 1, 1]))
    assert str(plan) == "global 32 = 2 processes x 2 devices x 8 rows"
    assert plan.local(32) == slice(0, 16)
    plan = plan_batches(32, None, mesh_of_processes([1, 1, 0, 0]))
    assert plan.local(32) == slice(16, 32)


def test_processes_that_hold_the_same_shards_read_the_same_rows():
    both = mesh_of_processes([[0, 1], [0, 1]], ("data", "model"))
    plan = plan_batches(8, None, both)
    assert plan.local(8) == slice(0, 8)
    assert str(plan) == "global 8 = 1 process x 2 shards of 2 devices x 4 rows"


@pytest.mark.parametrize("owners", [[0, 1, 0, 1], [0, 0, 0, 1]])
def test_a_mesh_that_mixes_processes_is_refused(owners):
    with pytest.raises(ValueError, match="order the mesh's devices by process"):
        plan_batches(8, None, mesh_of_processes(owners))


def test_a_process_without_a_device_is_told():
    with pytest.raises(ValueError, match="process 0 has no device in this mesh"):
        plan_batches(8, None, mesh_of_processes([1, 1]))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8), st.integers(1, 100))
def test_the_parts_of_all_processes_are_the_batch(processes, shards, rows, short):
    size = processes * shards * rows
    plans = [
        BatchPlan(size, processes, shards, first_shard=p * shards)
        for p in range(processes)
    ]
    for count in {size, max(processes, min(short, size))}:
        parts = [np.arange(count)[plan.local(count)] for plan in plans]
        np.testing.assert_array_equal(np.concatenate(parts), np.arange(count))
    assert {len(np.arange(size)[plan.local(size)]) for plan in plans} == {shards * rows}


def test_a_batch_too_small_for_the_processes_is_refused_on_all_of_them():
    for first in (0, 2):
        with pytest.raises(ValueError, match="1 row leaves some of 2 processes"):
            BatchPlan(8, 2, 2, first_shard=first).local(1)
