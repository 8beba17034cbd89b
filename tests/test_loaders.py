"""Loaders with worker processes, by stand-ins that look like torch's."""

import multiprocessing

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.data.loaders import check_loader
from lockstep.data.prefetching import prefetch


class DataLoader:
    """The attributes of a torch `DataLoader` that lockstep looks at."""

    def __init__(self, batches=(), num_workers=0, multiprocessing_context=None):
        self.batches, self.num_workers = batches, num_workers
        self.multiprocessing_context = multiprocessing_context

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("context", ["fork", multiprocessing.get_context("fork")])
def test_forked_workers_are_refused_with_the_way_out(mesh_of, context):
    loader = DataLoader(num_workers=2, multiprocessing_context=context)
    with pytest.raises(ValueError, match="forks 2 .*multiprocessing_context='spawn'"):
        prefetch(loader, mesh_of(2))


@pytest.mark.parametrize("default", ["fork", "forkserver"])
def test_the_default_of_this_python_is_found_and_not_settled(monkeypatch, default):
    # 3.14 changed the default of Linux from fork to forkserver.
    def start_method(allow_none=False):
        assert allow_none, "asking without allow_none settles the default for good"
        return None

    monkeypatch.setattr(multiprocessing, "get_start_method", start_method)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [default])
    loader = DataLoader(num_workers=2)
    if default == "fork":
        with pytest.raises(ValueError, match="forks 2 worker processes"):
            check_loader(loader)
    else:
        check_loader(loader)


def test_workers_by_spawn_and_loaders_without_workers_are_used(mesh_of):
    batches = [{"x": np.arange(4)}]
    spawned = DataLoader(batches, 2, multiprocessing.get_context("spawn"))
    for loader in (spawned, DataLoader(batches), DataLoader(batches, 0, "fork")):
        (batch,) = prefetch(loader, mesh_of(2))
        assert int(batch["x"].sum()) == 6


def test_jax_arrays_from_worker_processes_are_refused(mesh_of):
    loader = DataLoader([{"x": jnp.arange(4)}], 2, "spawn")
    with pytest.raises(ValueError, match="return NumPy arrays from the dataset"):
        list(prefetch(loader, mesh_of(2)))


def test_torchs_failure_to_collate_jax_arrays_is_explained(mesh_of):
    def collate():
        raise TypeError(f"default_collate: found {type(jnp.ones(()))}")
        yield

    with pytest.raises(TypeError, match="default_collate") as caught:
        list(prefetch(collate(), mesh_of(2)))
    assert "return NumPy arrays from the dataset" in caught.value.__notes__[0]
