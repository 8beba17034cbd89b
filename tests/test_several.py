"""`Trainer(steps_per_call=k)`: the same training in fewer dispatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep as ls
from lockstep.callbacks import Log, StopOnNonFinite

ROWS, WIDTH = 16, 3


def batches_of(count, rows=ROWS):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
            "y": rng.normal(size=rows).astype(np.float32),
        }
        for _ in range(count)
    ]


def loss(params, batch, key):
    noise = jax.random.bernoulli(key, 0.8, batch["x"].shape)
    return (batch["x"] * noise @ params - batch["y"]) ** 2, {"size": params.sum()}


def step_of(view):
    axis = "data" if view == "device" else None
    return ls.make_train_step(loss, optax.adam(0.1), axis_name=axis)


class Lines:
    def __init__(self):
        self.lines = []

    def write(self, step, scalars):
        self.lines.append((step, scalars["loss"]))


def trained(mesh, view, batches, *, count, remainder="error", **amount):
    """The final state, the loss of every step, and the trainer."""
    step, lines = step_of(view), Lines()
    seen = []

    class Keep:
        def observe(self, info):
            seen.append((info.step, info.epoch, info.metrics["loss"]))

        def __call__(self, info):
            _ = info.state  # the state of the newest step is there

    trainer = ls.Trainer(
        step,
        mesh=mesh,
        remainder=remainder,
        steps_per_call=count,
        callbacks=[Keep(), ls.every(3, Log(lines)), StopOnNonFinite()],
    )
    state = step.init(jnp.ones(WIDTH), key=jax.random.key(3))
    state = trainer.fit(state, batches, **amount)
    losses = [(s, e, float(loss)) for s, e, loss in seen]
    return ls.to_host(state.params), losses, trainer, lines.lines


@pytest.mark.parametrize("view", ["global", "device"])
class TestSameTraining:
    def test_as_one_by_one(self, mesh_of, view):
        batches = batches_of(7)
        want = trained(mesh_of(4), view, batches, count=1, epochs=3)
        got = trained(mesh_of(4), view, batches, count=3, epochs=3)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        for (step, epoch, value), expected in zip(got[1], want[1], strict=True):
            assert (step, epoch) == expected[:2]
            assert value == pytest.approx(expected[2], rel=1e-6)

    def test_ragged_batches(self, mesh_of, view):
        batches = [*batches_of(4), batches_of(1, rows=5)[0]]
        args = mesh_of(4), view, batches
        want = trained(*args, count=1, remainder="pad", epochs=2)
        got = trained(*args, count=2, remainder="pad", epochs=2)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_compiles_one_more_program_and_runs_it(mesh_of):
    _, _, trainer, _ = trained(mesh_of(2), "global", batches_of(6), count=2, epochs=4)
    assert trainer.parallel.compiles.count == 2
    assert trainer.parallel.compiles.entries[1].reason == "2 steps in one call"
    assert trainer.step == 24


def test_the_steps_that_fill_no_call_compile_nothing(mesh_of):
    _, _, trainer, _ = trained(mesh_of(2), "global", batches_of(14), count=4)
    assert trainer.parallel.compiles.count == 2 and trainer.step == 14


def test_log_writes_the_same_lines(mesh_of):
    batches = batches_of(8)
    *_, want = trained(mesh_of(2), "global", batches, count=1, epochs=2)
    *_, lines = trained(mesh_of(2), "global", batches, count=4, epochs=2)
    assert [step for step, _ in lines] == [3, 6, 9, 12, 15, 16]
    for (_, value), (_, expected) in zip(lines, want, strict=True):
        assert value == pytest.approx(expected, rel=1e-6)


def test_a_bare_log_writes_every_step_and_reads_none_that_is_under_way(mesh_of):
    lines, behind = Lines(), []

    class Look:
        def __call__(self, info):
            behind.append(info.step - (lines.lines[-1][0] if lines.lines else 0))

    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), {"loss": w}),
        mesh=mesh_of(2),
        steps_per_call=4,
        callbacks=[Log(lines), Look()],
    )
    trainer.fit(jnp.zeros(()), [np.ones(4, np.float32)] * 23)
    assert lines.lines == [(i + 1, float(i)) for i in range(23)]
    assert behind == [4, 8, 8, 8, 8, 7]  # a call is read when two more are handed over


def test_other_callbacks_come_after_the_call_with_their_step(mesh_of):
    seen = []
    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), {"loss": w}),
        mesh=mesh_of(2),
        steps_per_call=4,
        callbacks=[ls.every(3, lambda info: seen.append(info.step))],
    )
    trainer.fit(jnp.zeros(()), [np.ones(4, np.float32)] * 16)
    # Steps 3, 6, 9, 12, 15: at the ends of the calls 1-4, 5-8, 9-12, 13-16.
    assert seen == [4, 8, 12, 16]


def test_every_metric_is_there_for_the_loop(mesh_of):
    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), w), mesh=mesh_of(2), steps_per_call=4
    )
    found = []
    for info in trainer.steps(jnp.zeros(()), [np.ones(4, np.float32)] * 10):
        assert len(info.call_metrics) == len(info.call)
        found += [float(metrics["loss"]) for metrics in info.call_metrics]
    assert found == list(range(10))


@pytest.mark.parametrize("count", [1, 4])
def test_what_came_before_a_loader_failed_is_trained(mesh_of, count):
    def batches():
        for i in range(11):
            if i == 6:
                raise OSError("the disk is gone")
            yield np.ones(4, np.float32)

    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), None), mesh=mesh_of(2), steps_per_call=count
    )
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(jnp.zeros(()), batches())
    assert trainer.step == 6 and float(trainer.state) == 6


def test_the_program_of_a_call_does_not_count_for_max_compiles(mesh_of):
    trainer = ls.Trainer(
        lambda w, x: (w + x.sum(), None),
        mesh=mesh_of(2),
        steps_per_call=2,
        max_compiles=1,
    )
    sizes = [4, 4, 4, 4, 8]
    batches = [np.ones(n, np.float32) for n in sizes]
    assert float(trainer.fit(jnp.zeros(()), batches[:4])) == 16
    with pytest.raises(RuntimeError, match="a second time, above max_compiles=1"):
        trainer.fit(jnp.zeros(()), batches)


def test_the_loop_gets_the_last_step_of_each_call(mesh_of):
    trainer = ls.Trainer(
        lambda w, x: (w - 0.1 * (w - x).mean(), {"loss": w}),
        mesh=mesh_of(2),
        steps_per_call=4,
    )
    batches = [np.ones(4, np.float32)] * 6
    seen = [
        (info.step, list(info.call), float(info.state) < 1)
        for info in trainer.steps(jnp.zeros(()), batches, epochs=2)
    ]
    assert seen == [
        (4, [1, 2, 3, 4], True),
        (6, [5, 6], True),
        (10, [7, 8, 9, 10], True),
        (12, [11, 12], True),
    ]


def test_the_state_inside_a_call_is_gone(mesh_of):
    class Early:
        def observe(self, info):
            _ = info.state

        def __call__(self, info):
            pass

    trainer = ls.Trainer(
        lambda w, x: (w, {"loss": x.mean()}),
        mesh=mesh_of(2),
        steps_per_call=2,
        callbacks=[Early()],
    )
    with pytest.raises(RuntimeError, match="steps 1 to 2 are one call"):
        trainer.fit(jnp.zeros(()), [np.ones(4, np.float32)] * 4)


def test_the_callers_arrays_and_every_metric_survive(mesh_of):
    start = jnp.zeros(())
    trainer = ls.Trainer(
        lambda w, x: (w + x.mean(), None), mesh=mesh_of(2), steps_per_call=5
    )
    state = trainer.fit(start, [np.ones(4, np.float32)] * 20)
    assert float(state) == 20 and float(start) == 0


def test_another_shape_runs_one_by_one(mesh_of):
    sizes = [8, 8, 8, 4, 8, 8]
    trainer = ls.Trainer(
        lambda w, x: (w + x.sum(), {"loss": w}), mesh=mesh_of(2), steps_per_call=2
    )
    state = trainer.fit(jnp.zeros(()), [np.ones(n, np.float32) for n in sizes])
    assert float(state) == sum(sizes)


def test_a_key_of_its_own_for_each_step(mesh_of):
    def step(w, x, key):
        return w + x.mean(), {"loss": jax.random.uniform(key)}

    def losses(count):
        seen = []

        class Keep:
            def observe(self, info):
                seen.append(info.metrics["loss"])

            def __call__(self, info):
                pass

        trainer = ls.Trainer(
            step,
            mesh=mesh_of(2),
            key=jax.random.key(1),
            steps_per_call=count,
            callbacks=[Keep()],
        )
        trainer.fit(jnp.zeros(()), [np.ones(4, np.float32)] * 9)
        return [float(loss) for loss in seen]

    assert losses(3) == losses(1)
    assert len(set(losses(3))) == 9


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError)])
def test_refuses_what_is_no_count(mesh_of, count, error):
    with pytest.raises(error, match="steps_per_call"):
        ls.Trainer(step_of("global"), mesh=mesh_of(2), steps_per_call=count)
