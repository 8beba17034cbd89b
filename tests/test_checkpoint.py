"""Checkpoints by themselves: every kind of state comes back, or nothing does."""

import json
import logging
import os
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls
from lockstep import notices
from lockstep.checkpoint import Checkpointer
from lockstep.checkpoint.store import Store


@pytest.fixture
def said(caplog):
    """The notices of this test, those that are said once included."""
    notices.reset()
    caplog.set_level(logging.INFO, logger="lockstep")
    yield lambda: [r.getMessage() for r in caplog.records if r.name == "lockstep"]
    notices.reset()


def saved(directory, *steps, state=None, **options):
    """A Checkpointer whose directory holds these steps: w is the step's number."""
    checkpoints = Checkpointer(directory, **options)
    for step in steps:
        checkpoints.save(
            step, {"w": jnp.full(4, float(step))} if state is None else state
        )
    checkpoints.wait()
    return checkpoints


def blank(state):
    """The same tree with other values, placed as before."""

    def other(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jnp.zeros_like(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        return ~leaf if leaf.dtype == bool else leaf * 0

    return jax.tree.map(other, state)


def assert_equal(got, want):
    """The same tree: bits, types, weak types and places."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(right, jax.Array):
            assert type(left) is type(right)
            assert np.all(left == right)
            continue
        assert left.dtype == right.dtype
        assert left.sharding == right.sharding
        if jax.dtypes.issubdtype(right.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(left) == jax.random.key_impl(right)
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert left.weak_type == right.weak_type
        assert np.array_equal(left, right)


def every_kind():
    return {
        "float": jnp.arange(12.0).reshape(3, 4),
        "bfloat16": jnp.ones(3, jnp.bfloat16),
        "int8": jnp.int8(3),
        "int4": jnp.arange(3, dtype=jnp.int4),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1j, 2.0]),
        "no rows": jnp.zeros((0, 3)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "number": 3,
        "rate": 0.5,
        "a/b": {"c.d": jnp.ones(2)},
        "a": {"b/c.d": jnp.zeros(2)},
        "nothing": None,
        "flag": True,
        "name": "adam",
        "function": jax.nn.relu,
        "adam": optax.adam(1e-3).init({"w": jnp.ones(3)}),
    }


class TestEveryKindOfState:
    def test_comes_back_as_it_was(self, tmp_path, mesh_of):
        state = ls.replicate(every_kind(), mesh_of(8))
        checkpoints = saved(tmp_path, 1, state=state)
        assert_equal(checkpoints.restore(blank(state)), state)

    def test_comes_back_on_the_host_where_it_was_on_the_host(self, tmp_path):
        state = {"w": np.arange(3.0), "n": 7, "rate": 0.25, "f": np.float32(2)}
        checkpoints = saved(tmp_path, 1, state=state)
        like = {"w": np.zeros(3), "n": 0, "rate": 0.0, "f": np.float32(0)}
        got = checkpoints.restore(like)
        assert (got["n"], got["rate"], got["f"]) == (7, 0.25, 2)
        assert type(got["w"]) is np.ndarray
        assert np.array_equal(got["w"], state["w"])

    def test_of_the_libraries_goes_through(self, tmp_path, mesh_of):
        import equinox as eqx
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.layer = nnx.Linear(2, 3, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

        model = Model(nnx.Rngs(0))
        states = {
            "nnx": nnx.split(model)[1],
            "equinox": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
            "tuple": ({"w": jnp.ones(2)}, optax.sgd(0.1, 0.9).init({"w": jnp.ones(2)})),
        }
        for name, state in states.items():
            state = ls.replicate(state, mesh_of(2))
            checkpoints = saved(tmp_path / name, 1, state=state)
            assert_equal(checkpoints.restore(blank(state)), state)

    def test_is_written_once_however_many_devices_hold_it(self, tmp_path, mesh_of):
        values = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
        sizes = []
        for n in (1, 8):
            state = ls.replicate({"w": values}, mesh_of(n))
            saved(tmp_path / str(n), 1, state=state)
            files = (tmp_path / str(n)).rglob("*")
            sizes.append(sum(f.stat().st_size for f in files if f.is_file()))
        assert sizes[1] < 1.2 * sizes[0]

    def test_goes_to_other_devices_and_layouts(self, tmp_path, mesh_of):
        values = {"w": np.arange(16.0, dtype=np.float32), "n": np.int32(5)}
        rows = ls.sharding.rows(mesh_of(8))
        state = ls.replicate(values, mesh_of(8))
        checkpoints = saved(
            tmp_path, 1, state=state | {"w": jax.device_put(state["w"], rows)}
        )
        for n in (1, 2, 4):
            like = blank(ls.replicate(values, mesh_of(n)))
            got = checkpoints.restore(like)
            assert_equal(got, ls.replicate(values, mesh_of(n)))

    def test_is_restored_while_a_mesh_is_set(self, tmp_path, mesh_of):
        with jax.set_mesh(mesh_of(4)):
            state = ls.replicate(every_kind(), mesh_of(4))
            checkpoints = saved(tmp_path, 1, state=state)
            assert_equal(checkpoints.restore(blank(state)), state)

    def test_may_be_wanted_by_a_description_alone(self, tmp_path, mesh_of):
        state = ls.replicate({"w": jnp.arange(3.0), "k": jax.random.key(1)}, mesh_of(2))
        checkpoints = saved(tmp_path, 1, state=state)
        described = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        assert_equal(checkpoints.restore(described), state)

    def test_may_be_donated_as_soon_as_save_returns(self, tmp_path, mesh_of):
        move = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        start = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
        whole = ls.replicate(start, mesh_of(8))
        state = {
            "all": whole,
            "rows": jax.device_put(start, ls.sharding.rows(mesh_of(8))),
        }
        checkpoints = Checkpointer(tmp_path)
        for step in range(3):
            checkpoints.save(step, state)
            before, state = state, move(state)
            assert before["all"].is_deleted()
        checkpoints.wait()
        for step in range(3):
            got = checkpoints.restore(state, step)
            want = np.asarray(start)
            for _ in range(step):
                want = want + np.float32(1)
            assert np.array_equal(got["all"], want)
            assert np.array_equal(got["rows"], want)


class TestAnotherState:
    """Saved: w float32[4]."""

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (
                {"w": jnp.zeros(5)},
                r"state\['w'\] is saved as float32\[4\], .* float32\[5\]",
            ),
            (
                {"w": jnp.zeros(4, jnp.int32)},
                r"float32\[4\], and this run has int32\[4\]",
            ),
            ({"v": jnp.zeros(4)}, r"state\['v'\] \(float32\[4\]\) is not in the"),
            ({"w": jnp.zeros(4), "n": 1}, r"state\['n'\] \(int32\[\]\) is not in the"),
            (
                {"w": jnp.zeros(4), "n": None},
                r"state\['n'\] \(NoneType\) is not in the",
            ),
            ({}, r"state\['w'\] \(float32\[4\]\) is only in the checkpoint"),
        ],
    )
    def test_is_refused_by_path(self, tmp_path, other, says):
        checkpoints = saved(tmp_path, 1)
        with pytest.raises(ValueError, match=says) as error:
            checkpoints.restore(other)
        assert "nothing of it was loaded" in str(error.value)
        assert checkpoints.steps == [1]

    def test_of_another_optimizer_is_refused(self, tmp_path):
        params = {"w": jnp.ones(3)}
        checkpoints = saved(tmp_path, 1, state=optax.adam(1e-3).init(params))
        with pytest.raises(ValueError, match=r"state\[0\]\.trace\['w'\] .* is not in"):
            checkpoints.restore(optax.sgd(1e-3, 0.9).init(params))
        with pytest.raises(ValueError, match=r"state\[2\] \(EmptyState\) is not in"):
            checkpoints.restore(optax.adamw(1e-3).init(params))

    def test_a_number_takes_what_a_step_made_of_it(self, tmp_path, mesh_of):
        state = ls.replicate({"n": jnp.float32(2.5)}, mesh_of(2))
        checkpoints = saved(tmp_path, 1, state=state)
        assert_equal(checkpoints.restore(ls.replicate({"n": 0.0}, mesh_of(2))), state)

    def test_with_two_leaves_of_one_path_is_refused(self, tmp_path):
        @jax.tree_util.register_pytree_with_keys_class
        class Twice:
            def __init__(self, *values):
                self.values = values

            def tree_flatten_with_keys(self):
                key = jax.tree_util.GetAttrKey("w")
                return [(key, value) for value in self.values], None

            @classmethod
            def tree_unflatten(cls, _, values):
                return cls(*values)

        with pytest.raises(ValueError, match="two leaves state.w"):
            Checkpointer(tmp_path).save(1, Twice(jnp.zeros(2), jnp.ones(2)))


class TestAStackedState:
    """As pmap keeps it: one row a device."""

    def test_is_taken_for_one_copy(self, tmp_path, mesh_of, said):
        rows = {"w": np.tile(np.arange(3.0, dtype="f"), (4, 1)), "n": np.full(4, 7)}
        checkpoints = saved(tmp_path, 1, state=jax.tree.map(jnp.asarray, rows))
        like = ls.replicate({"w": jnp.zeros(3), "n": jnp.int32(0)}, mesh_of(2))
        want = ls.replicate({"w": jnp.arange(3.0), "n": jnp.int32(7)}, mesh_of(2))
        assert_equal(checkpoints.restore(like), want)
        assert any("one a device as pmap keeps them" in text for text in said())

    def test_with_different_rows_is_refused(self, tmp_path):
        checkpoints = saved(tmp_path, 1, state={"w": jnp.ones((4, 3)).at[2].set(9)})
        with pytest.raises(ValueError, match=r"row 2 differs from row 0"):
            checkpoints.restore({"w": jnp.zeros(3)})

    def test_is_saved_as_one_copy(self, tmp_path, mesh_of):
        state = ls.compat.replicate({"w": jnp.arange(3.0)}, jax.devices()[:4])
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save(1, state, stacked=True)
        checkpoints.wait()
        got = checkpoints.restore({"w": np.zeros(3, np.float32)})
        assert np.array_equal(got["w"], [0, 1, 2])
        with pytest.raises(ValueError, match="has no row on each device"):
            checkpoints.save(2, {"w": jnp.zeros((4, 3))}, stacked=True)


class TestWhatIsKept:
    def test_are_the_newest(self, tmp_path):
        assert saved(tmp_path, 1, 2, 3, 4, 5, keep=2).steps == [4, 5]
        assert saved(tmp_path / "all", *range(5), keep=None).steps == [0, 1, 2, 3, 4]

    def test_a_step_saved_again_is_replaced(self, tmp_path):
        checkpoints = saved(tmp_path, 3)
        checkpoints.save(3, {"w": jnp.full(4, 8.0)})
        checkpoints.wait()
        assert checkpoints.restore({"w": np.zeros(4, np.float32)})["w"][0] == 8

    def test_what_is_not_there_is_named(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match="no complete checkpoint; it has none"
        ):
            Checkpointer(tmp_path / "new").restore({})
        with pytest.raises(FileNotFoundError, match="of step 7; it has 1, 2"):
            saved(tmp_path, 1, 2).restore({"w": jnp.zeros(4)}, step=7)

    @pytest.mark.parametrize(
        "options",
        [
            {"every": 0},
            {"keep": 0},
            {"keep": True},
            {"best_is": "up"},
            {"policy": "no"},
        ],
    )
    def test_a_wrong_option_is_refused(self, tmp_path, options):
        (name,) = options
        with pytest.raises(ValueError, match=name):
            Checkpointer(tmp_path, **options)

    def test_a_bucket_is_refused(self):
        with pytest.raises(ValueError, match="mount the bucket"):
            Checkpointer("gs://bucket/run")


def cut_short(path):
    """Cuts the largest data file of a checkpoint in half."""
    files = [f for f in (path / "state").rglob("*") if f.is_file() and "d" in f.parts]
    largest = max(files, key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def remove_state(path):
    for file in sorted((path / "state").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def remove_list(path):
    (path / "run" / "metadata").write_text("{")


def test_a_checkpoint_of_empty_files_is_none(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": np.ones(4, np.float32)})
    checkpoints.wait()
    for file in (tmp_path / "2").rglob("*"):
        if file.is_file():
            os.truncate(file, 0)
    assert list(checkpoints.steps) == [1]


class TestDamage:
    """Steps 1 and 2 are there, and 2 is damaged."""

    LIKE = {"w": np.zeros(4096, np.float32)}

    @pytest.fixture(params=[cut_short, remove_state, remove_list])
    def damaged(self, request, tmp_path):
        rng = np.random.default_rng(0)
        checkpoints = Checkpointer(tmp_path)
        for step in (1, 2):
            values = rng.normal(size=4096).astype(np.float32)
            values[0] = step
            checkpoints.save(step, {"w": values})
        checkpoints.wait()
        request.param(tmp_path / "2")
        return checkpoints

    def test_leads_to_the_checkpoint_before(self, damaged, said):
        """One who only reads changes nothing: the run may still be writing."""
        assert damaged.restore(self.LIKE)["w"][0] == 1
        assert sorted(p.name for p in damaged.directory.iterdir()) == ["1", "2"]
        (text,) = said()
        assert "2 cannot be read" in text
        assert "passed over; it stays there" in text

    def test_is_set_aside_by_the_run_that_goes_on(self, damaged, said):
        saved, state = damaged.newest(self.LIKE, owned=True)
        assert (saved.step, state["w"][0]) == (1, 1)
        assert (damaged.directory / "2.damaged").is_dir()
        assert "set aside as 2.damaged" in said()[0]
        damaged.save(2, {"w": np.full(4096, 9, np.float32)})
        damaged.wait()
        assert damaged.restore(self.LIKE)["w"][0] == 9

    def test_of_all_is_an_error_and_nothing_is_renamed(self, damaged):
        remove_list(damaged.directory / "1")
        with pytest.raises(
            RuntimeError, match="no checkpoint in .* can be read; step 2"
        ):
            damaged.newest(self.LIKE, owned=True)
        assert sorted(p.name for p in damaged.directory.iterdir()) == ["1", "2"]

    def test_of_the_step_that_is_asked_for_is_an_error(self, damaged):
        with pytest.raises((RuntimeError, FileNotFoundError), match="2"):
            damaged.restore(self.LIKE, step=2)

    def test_leftovers_of_killed_processes_are_removed(self, tmp_path):
        checkpoints = saved(tmp_path, 1)
        for name in ("2.orbax-checkpoint-tmp", "0.removed"):
            (tmp_path / name / "state").mkdir(parents=True)
        assert checkpoints.restore({"w": np.zeros(4, np.float32)})["w"][0] == 1
        assert len(list(tmp_path.iterdir())) == 3
        assert checkpoints.take_over()
        assert [p.name for p in tmp_path.iterdir()] == ["1"]


class TestAWriteThatFails:
    BIG = {"w": np.random.default_rng(0).normal(size=300_000).astype(np.float32)}

    @pytest.fixture
    def small_files(self):
        """No file may grow beyond 100 kB, as on a disk that is nearly full."""
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)

    def test_says_step_and_path_and_loses_nothing(self, tmp_path, small_files):
        checkpoints = saved(tmp_path, 1)
        checkpoints.save(2, self.BIG)
        with pytest.raises(RuntimeError) as error:
            checkpoints.wait()
        assert "checkpoint of step 2 could not be written to" in str(error.value)
        assert str(tmp_path) in str(error.value)
        assert "(steps: 1)" in str(error.value)
        assert [p.name for p in tmp_path.iterdir()] == ["1"]
        assert checkpoints.restore({"w": np.zeros(4, np.float32)})["w"][0] == 1

    def test_does_not_stand_in_the_way_of_the_next(self, tmp_path, small_files):
        checkpoints = saved(tmp_path, 1)
        checkpoints.save(2, self.BIG)
        with pytest.raises(RuntimeError, match="step 2"):
            checkpoints.save(3, {"w": jnp.zeros(4)})
        checkpoints.save(3, {"w": jnp.zeros(4)})
        checkpoints.wait()
        assert checkpoints.steps == [1, 3]

    def test_for_a_place_that_is_no_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(RuntimeError, match="cannot be made"):
            Checkpointer(tmp_path / "file" / "run").save(1, {"w": jnp.zeros(4)})

    def test_of_a_state_that_was_donated(self, tmp_path):
        w = jnp.zeros(4)
        w.delete()
        with pytest.raises(RuntimeError, match=r"state\['w'\] was donated"):
            Checkpointer(tmp_path).save(1, {"w": w})


def test_the_list_of_leaves_is_plain_json(tmp_path):
    saved(tmp_path, 1)
    run = json.loads((tmp_path / "1" / "run" / "metadata").read_text())
    assert run["leaves"]["state['w']"]["form"] == "float32[4]"
    assert set(run["versions"]) == {"lockstep", "jax", "jaxlib"}
    assert Store(tmp_path).read_run(1) == run


def test_a_checkpoint_that_another_process_deletes_meanwhile_is_none(
    tmp_path, monkeypatch
):
    (tmp_path / "4").mkdir()
    monkeypatch.setattr(type(tmp_path), "is_file", lambda path: True)  # a moment ago
    assert Store(tmp_path).steps() == []
