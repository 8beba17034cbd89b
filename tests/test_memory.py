"""What a step needs on each device, found by compiling, and what the devices hold."""

import dataclasses
import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep import callbacks, compat, debug
from lockstep.loop import Trainer
from lockstep.memory.search import _narrow
from lockstep.notices import reset
from lockstep.parallel import parallelize, per_device
from lockstep.placement import replicate, shard_batch
from lockstep.step import make_train_step
from lockstep.step.parameters import parameter_paths

OPTIMIZER = optax.adam(0.1)
WIDTH = 64
PARAMS = {"w": jnp.ones((4, WIDTH)), "out": jnp.ones((WIDTH, 2))}
PARAMS_BYTES = 4 * (4 * WIDTH + WIDTH * 2)
STATE_BYTES = 3 * PARAMS_BYTES + 4  # and the count of Adam


def batch_of(rows):
    return {"x": np.ones((rows, 4), np.float32), "y": np.ones((rows, 2), np.float32)}


def loss_of(params, batch):
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) ** 2)
    return ((hidden @ params["out"] - batch["y"]) ** 2).mean()


def global_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}


def device_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.lax.pmean(grads, "data")
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {
        "loss": jax.lax.pmean(loss, "data")
    }


def make_state():
    return PARAMS, OPTIMIZER.init(PARAMS)


def mapped_step(**options):
    return compat.pmap(device_step, "data", devices=jax.devices()[:4], **options)


def mapped_args(rows):
    stacked = jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), batch_of(rows))
    return compat.replicate(make_state(), jax.devices()[:4]), stacked


def named(report, start):
    return next(c for c in report.choices if c.name.startswith(start))


@pytest.mark.parametrize("view", [parallelize, per_device])
def test_a_healthy_step(mesh_of, caplog, view):
    caplog.set_level(logging.INFO)
    step = view({parallelize: global_step, per_device: device_step}[view], mesh_of(4))
    report = debug.memory(step, make_state(), batch_of(256))
    assert report.warnings == () and not caplog.records
    assert step.compiles.count == 0
    usage = report.usage
    assert report.state == STATE_BYTES == usage.reused
    assert usage.arguments == STATE_BYTES + 256 // 4 * 6 * 4
    assert usage.temporaries >= 256 // 4 * WIDTH * 4  # one hidden layer
    assert report.peak == usage.arguments + usage.outputs - STATE_BYTES + (
        usage.temporaries
    )
    text = str(report)
    assert "one step of 256 rows, on each device" in text
    assert "donate" not in text.replace("in donated memory", "")
    assert max(map(len, text.splitlines())) <= 88
    assert "temporaries" in report._repr_html_()


def test_what_sharding_saves_is_arithmetic(mesh_of):
    report = debug.memory(
        parallelize(global_step, mesh_of(4)), make_state(), batch_of(8)
    )
    moments = named(report, "optimizer_sharding")
    assert (moments.saves, moments.how) == (2 * PARAMS_BYTES * 3 // 4, "computed")
    assert named(report, "fsdp").saves == 3 * PARAMS_BYTES * 3 // 4
    first = report.leaves[0]
    assert first.path in ("state[0]['w']", "state[1][0].mu['w']", "state[1][0].nu['w']")
    assert (first.nbytes, first.saves) == (4 * 4 * WIDTH, 3 * 4 * WIDTH)


def test_a_state_that_is_split_already_has_nothing_to_save(mesh_of):
    mesh = mesh_of(4)
    split = jax.NamedSharding(mesh, jax.P(None, "data"))
    state = jax.device_put(jnp.ones((4, WIDTH)), split)
    step = parallelize(lambda w, x: (w - x.mean(), None), mesh)
    report = debug.memory(step, state, np.ones((8, 3), np.float32))
    assert report.state == 4 * WIDTH and not report.choices


def test_a_state_that_is_not_donated(mesh_of):
    step = parallelize(global_step, mesh_of(4), donate_argnums=())
    report = debug.memory(step, make_state(), batch_of(8))
    (warning,) = report.warnings
    assert "nothing is donated: the old and the new state, 4.504 KiB each" in warning
    assert named(report, "donate the state").saves == STATE_BYTES
    assert report.usage.reused == 0


def test_a_donation_that_reuses_a_part(mesh_of):
    step = jax.jit(
        lambda state, x: ((state[0] + x.sum(), state[1] + 1), None),
        donate_argnums=0,
        out_shardings=((jax.NamedSharding(mesh_of(4), jax.P()),) * 2, None),
    )
    split = jax.NamedSharding(mesh_of(4), jax.P("data"))
    whole = jax.NamedSharding(mesh_of(4), jax.P())
    state = jax.device_put((np.ones(256), np.ones(256)), (split, whole))
    report = debug.memory(step, state, jax.device_put(np.ones(8), split))
    assert "donation reuses 1 KiB of the state's 1.25 KiB" in report.warnings[0]


def test_an_evaluation_step_has_no_state_to_donate(mesh_of):
    step = parallelize(lambda params, batch: loss_of(params, batch), mesh_of(4))
    report = debug.memory(step, PARAMS, batch_of(8))
    assert report.usage.reused == 0 and report.warnings == ()


def test_pmap(caplog):
    caplog.set_level(logging.INFO)
    args = mapped_args(256)
    step = mapped_step(donate_argnums=0)
    report = debug.memory(step, *args)
    assert report.warnings == () and not caplog.records
    assert (report.rows, report.devices, report.state) == (256, 4, STATE_BYTES)
    assert named(report, "fsdp").saves == 3 * PARAMS_BYTES * 3 // 4
    assert "nothing is donated" in debug.memory(mapped_step(), *args).warnings[0]
    assert step.compiles.count == 0
    found = debug.largest_batch(step, *args, 200_000)
    assert found.peak <= 200_000 < found.next_peak
    assert found.rows % 4 == 0 and step.compiles.count == 0


def test_the_variants_of_a_train_step_are_compiled(mesh_of):
    step = make_train_step(loss_of, OPTIMIZER)
    parallel = parallelize(step, mesh_of(4))
    state, batch = step.init(PARAMS), batch_of(1024)
    report = debug.memory(parallel, state, batch)
    half = named(report, "accumulate=2")
    assert half.how == "compiled"
    other = dataclasses.replace(step, accumulate=2)
    assert report.peak - half.saves == (
        debug.memory(parallelize(other, mesh_of(4)), state, batch).peak
    )
    assert half.saves > 0.3 * report.usage.temporaries
    assert named(report, "accumulate=4").saves > half.saves
    assert len(report.actions) == 3
    assert report.actions[0].startswith("accumulate=4: saves")


def test_half_the_rows_of_a_plain_step_are_compiled(mesh_of):
    step = parallelize(global_step, mesh_of(4))
    report = debug.memory(step, make_state(), batch_of(1024))
    choice = named(report, "accumulate=2 in make_train_step")
    assert choice.how == "compiled"
    half = debug.memory(step, make_state(), batch_of(512))
    saved = report.usage.temporaries - half.usage.temporaries
    assert choice.saves == saved - PARAMS_BYTES
    assert "at most" in str(report)  # remat, which cannot be had from outside


def test_rows_that_do_not_divide(mesh_of):
    with pytest.raises(ValueError, match="10 rows.* multiple of 4"):
        debug.memory(parallelize(global_step, mesh_of(4)), make_state(), batch_of(10))

    def masked(state, batch):
        grads = jax.grad(lambda w: (w * batch["x"][:, 0] * batch["mask"]).sum())(state)
        return state - grads, None

    padded = parallelize(masked, mesh_of(4), remainder="pad")
    assert debug.memory(padded, jnp.ones(()), batch_of(10)).rows == 12
    dropped = parallelize(global_step, mesh_of(4), remainder="drop")
    assert debug.memory(dropped, make_state(), batch_of(10)).rows == 8


def test_descriptions_do_for_what_has_no_room(mesh_of):
    step = parallelize(lambda w, x: (w + x.mean(), None), mesh_of(4))
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    report = debug.memory(step, huge, np.ones((8, 3), np.float32))
    assert report.state == 1 << 42
    assert "4096 GiB" in str(report)


class TestLargestBatch:
    def test_it_is_the_largest(self, mesh_of):
        step = parallelize(global_step, mesh_of(4))
        found = debug.largest_batch(step, make_state(), batch_of(8), 300_000)
        assert found.peak <= 300_000 < found.next_peak
        assert found.next_rows == found.rows + 4
        at = debug.memory(step, make_state(), batch_of(found.rows)).peak
        assert at == found.peak
        assert found.compiles <= 12 and step.compiles.count == 0
        assert f"{found.rows} rows ({found.rows // 4} on each of 4 devices)" in str(
            found
        )

    def test_microbatches_divide_it(self, mesh_of):
        step = make_train_step(loss_of, OPTIMIZER, axis_name="data", accumulate=3)
        found = debug.largest_batch(
            per_device(step, mesh_of(4)), step.init(PARAMS), batch_of(12), 60_000
        )
        assert found.rows % 12 == 0 and found.next_rows == found.rows + 12
        assert found.peak <= 60_000 < found.next_peak

    def test_a_state_that_does_not_fit(self, mesh_of):
        step = parallelize(global_step, mesh_of(4))
        with pytest.raises(
            ValueError, match="even 4 rows, 1 on each.*limit is 1.953 K"
        ):
            debug.largest_batch(step, make_state(), batch_of(8), 2000)

    def test_a_device_that_does_not_tell_its_limit(self, mesh_of):
        step = parallelize(global_step, mesh_of(4))
        with pytest.raises(ValueError, match="a cpu device does not tell.*limit_bytes"):
            debug.largest_batch(step, make_state(), batch_of(8))

    def test_where_nothing_grows(self, mesh_of):
        step = parallelize(lambda w, x: (w + 1, None), mesh_of(4))
        x = np.ones(8, np.float32)
        found = debug.largest_batch(step, 0.0, x, 1 << 40, max_rows=4000)
        assert (found.rows, found.next_rows) == (4000, None)
        assert str(found).endswith("more were not tried")

    @pytest.mark.parametrize("limit", [7, 64, 65, 999, 5000])
    @pytest.mark.parametrize(
        "peak",
        [
            lambda n: n,
            lambda n: 3 + n // 4 * 4,
            lambda n: n**2 // 8,
            lambda n: int(n**0.7),
        ],
    )
    def test_the_search_ends_at_the_border(self, peak, limit):
        asked = []

        def asking(n):
            asked.append(n)
            return peak(n)

        fits, fails = _narrow(asking, limit, 10**6)
        assert peak(fits) <= limit < peak(fails) and fails == fits + 1
        assert len(set(asked)) <= 40


class TestOutOfMemory:
    """A real failure of the CPU's allocator: some TiB on each device."""

    def hungry(self, state, batch):
        state, metrics = global_step(state, batch)
        table = jnp.sort(batch["x"][:, :1] + jnp.zeros((1, 10**9)), 1)
        return state, {"loss": metrics["loss"] + jnp.sort(table, 0).sum()}

    def test_the_error_carries_the_report(self, mesh_of):
        step = parallelize(self.hungry, mesh_of(8))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EX") as caught:
            step(make_state(), batch_of(8000))
        (note,) = caught.value.__notes__
        assert "one step of 8000 rows, on each device" in note
        assert "GiB" in note and "temporaries" in note
        assert "the next things to try:\n1. remat" in note
        assert "2. accumulate=2" in note and "3. fsdp" in note
        joined = " ".join(note.split())
        assert "lockstep.debug.largest_batch finds how many rows fit" in joined
        assert max(map(len, note.splitlines())) <= 88

    def test_it_passes_through_the_trainer(self, mesh_of):
        trainer = Trainer(parallelize(self.hungry, mesh_of(8)))
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            trainer.fit(make_state(), [batch_of(8000)])
        assert any("next things to try" in note for note in caught.value.__notes__)
        assert any("in step 1" in note for note in caught.value.__notes__)

    def test_other_errors_stay_as_they_are(self, mesh_of):
        def fails(x):
            raise ValueError("mine")

        def step(w, x):
            return w + jax.pure_callback(fails, jnp.zeros(()), x.sum()), None

        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            w, _ = parallelize(step, mesh_of(1))(0.0, np.ones(4, np.float32))
            w.block_until_ready()
        notes = getattr(caught.value, "__notes__", [])
        assert not [note for note in notes if "memory" in note]


class TestMemoryNow:
    SIZE = 1 << 20  # float32: 4 MiB, above what earlier tests may have left

    def test_a_replicated_state_and_a_split_batch_are_even(self, mesh_of):
        gc.collect()  # what other tests left behind
        before = debug.memory_now().by_device
        state = replicate({"w": np.ones(self.SIZE, np.float32)}, mesh_of(8))
        batch = shard_batch(np.ones((8, self.SIZE // 8), np.float32), mesh_of(8))
        now = debug.memory_now()
        grown = {d: now.by_device[d] - before[d] for d in now.by_device}
        want = 4 * self.SIZE + 4 * self.SIZE // 8
        assert all(abs(bytes - want) < 1000 for bytes in grown.values())
        assert now.warnings == ()
        assert str(now.largest[0]) and now.largest[0].text == "float32[1048576]"
        assert "float32[1048576], 4 MiB on devices 0 to 7" in str(now)
        state["w"].addressable_shards[3].data.sum()  # a view is no second copy
        assert debug.memory_now().by_device[3] - now.by_device[3] < 1000
        del state, batch

    def test_a_batch_that_lies_on_one_device(self):
        batch = jnp.ones((8, self.SIZE), jnp.float32)
        now = debug.memory_now()
        (warning,) = now.warnings
        assert now.ratio > 1.2 and "device 0 holds" in warning
        assert "only on the first: float32[8,1048576] (32 MiB)" in warning
        assert "no jnp.asarray before it" in warning and "warning: " in str(now)
        del batch

    def test_a_state_that_half_the_devices_hold(self, mesh_of):
        state = replicate(np.ones(self.SIZE, np.float32), mesh_of(4))
        (warning,) = debug.memory_now().warnings
        assert "float32[1048576] (4 MiB)" in warning
        assert debug.memory_now(min_bytes=1 << 30).warnings == ()
        del state

    def test_two_copies_of_a_state(self, mesh_of):
        first = jnp.ones(self.SIZE)
        state = replicate(first, mesh_of(8))
        (warning,) = debug.memory_now().warnings
        assert "let go of the first copy" in warning
        del first
        assert debug.memory_now().warnings == ()
        del state


def test_the_callbacks(mesh_of, caplog):
    reset()
    shown, seen = [], []
    extra = jnp.ones((8, 1 << 20))
    trainer = Trainer(
        parallelize(global_step, mesh_of(8)),
        callbacks=[
            callbacks.Inspect(debug.memory, show=shown.append),
            callbacks.WatchMemory(),
            lambda info: seen.append(info.results),
        ],
    )
    trainer.fit(make_state(), [batch_of(8)] * 3)
    (text,) = shown
    assert "one step of 8 rows, on each device" in text
    assert seen[0]["memory/fullest"] - seen[0]["memory/emptiest"] >= extra.nbytes
    said = [r.getMessage() for r in caplog.records if "holds" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("step 1: device 0 holds")
    assert trainer.parallel.compiles.count == 1


def test_the_callback_says_nothing_when_the_devices_are_even(mesh_of, caplog):
    reset()
    trainer = Trainer(
        parallelize(global_step, mesh_of(8)), callbacks=[callbacks.WatchMemory()]
    )
    trainer.fit(make_state(), [batch_of(8)] * 2)
    assert not [r for r in caplog.records if "holds" in r.getMessage()]


def test_which_leaves_are_parameters():
    moments = OPTIMIZER.init(PARAMS)
    want = {"state.params['out']", "state.params['w']"}
    step = make_train_step(loss_of, OPTIMIZER, ema=0.9)
    assert parameter_paths(step.init(PARAMS)) == want
    assert parameter_paths((PARAMS, moments, 3)) == {"state[0]['out']", "state[0]['w']"}
    assert parameter_paths({"a": 1.0, "n": 1, "s": "adam"}) == {"state['a']"}


def test_a_state_that_will_be_sharded_when_it_is_placed(mesh_of):
    def loss(params, batch):
        return (batch["x"] @ params["w"]) ** 2

    step = per_device(
        make_train_step(
            loss, optax.adam(0.1), axis_name="data", optimizer_sharding="data"
        ),
        mesh_of(8),
    )
    state = step.fn.init({"w": jnp.ones(4096)})
    batch = {"x": np.ones((8, 4096), np.float32)}
    fresh = debug.memory(step, state, batch)
    placed = debug.memory(step, step.place_state(state), step.place_batch(batch))
    assert str(fresh) == str(placed)
    assert "optimizer_sharding" not in str(fresh)
