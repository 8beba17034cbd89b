"""What is moved in every call is refused, by name; what lies right is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep as ls
from lockstep.compat import pmap, replicate
from lockstep.debug import no_transfers


def step_of(view, mesh):
    def step(w, batch, lr=0.1):
        loss = ((w - batch["x"]) ** 2).mean()
        loss = jax.lax.pmean(loss, "data") if view == "device" else loss
        return w - lr * loss, {"loss": loss}

    return (ls.per_device if view == "device" else ls.parallelize)(step, mesh)


def batch():
    return {"x": np.ones(8, np.float32)}


@pytest.mark.parametrize("view", ["global", "device"])
class TestInBothViews:
    def test_a_batch_from_the_host(self, mesh_of, view):
        step = no_transfers(step_of(view, mesh_of(4)))
        w, _ = step(0.0, step.place_batch(batch()))
        with pytest.raises(RuntimeError) as error:
            step(w, batch())
        assert str(error.value) == (
            "step: batch['x'] (float32[8]) comes from the host in every call: "
            "prefetch(batches, step) places it ahead, in a thread"
        )

    def test_a_python_number(self, mesh_of, view):
        step = no_transfers(step_of(view, mesh_of(4)))
        x = step.place_batch(batch())
        with pytest.raises(
            RuntimeError,
            match=r"step: lr \(weak float\[\]\) comes from the host in every call: "
            r"place it once, before the loop, with replicate\(..., mesh\)",
        ):
            step(0.0, x, 0.1)
        w = ls.replicate(0.0, mesh_of(4))
        with pytest.raises(RuntimeError, match=r"step: lr \(weak float"):
            step(w, x, lr=0.1)
        step(w, x, ls.replicate(0.1, mesh_of(4)))

    def test_an_array_on_one_device(self, mesh_of, view):
        step = no_transfers(step_of(view, mesh_of(4)))
        with pytest.raises(
            RuntimeError,
            match=r"batch\['x'\].* lies on device 0 alone and is copied to",
        ):
            step(0.0, {"x": jnp.ones(8)})

    def test_a_state_that_is_not_handed_on(self, mesh_of, view):
        step = no_transfers(step_of(view, mesh_of(4)))
        x = step.place_batch(batch())
        step(0.0, x)
        with pytest.raises(
            RuntimeError, match=r"step: w \(weak float\[\]\) comes from"
        ):
            step(0.0, x)

    def test_a_healthy_loop_is_left_alone(self, mesh_of, view):
        step = no_transfers(step_of(view, mesh_of(4)))
        w = 0.0
        for x in ls.prefetch([batch()] * 4, step):
            w, _ = step(w, x)
        assert step.compiles.count == 1


class TestCompatPmap:
    def mapped(self):
        return no_transfers(
            pmap(
                lambda w, x, lr, n: w + n * lr * x,
                in_axes=(0, 0, None, None),
                static_broadcasted_argnums=3,
                devices=jax.devices()[:2],
            )
        )

    def test_names_a_batch_and_a_number_but_no_static_argument(self):
        mapped = self.mapped()
        with pytest.raises(RuntimeError) as error:
            mapped(np.zeros(2), np.ones(2, np.float32), 0.1, 3)
        text = str(error.value)
        assert "x (float32[2]) comes from the host" in text
        assert "lr (weak float[]) comes from the host" in text and "n (" not in text

    def test_a_healthy_loop_is_left_alone(self, mesh_of):
        mapped, devices = self.mapped(), jax.devices()[:2]
        w, x = np.zeros(2, np.float32), replicate(np.float32(1), devices)
        lr = ls.replicate(0.5, mesh_of(2))
        for _ in range(3):
            w = mapped(w, x, lr, 2)
        np.testing.assert_array_equal(w, [3, 3])


class TestTheTrainer:
    def trainer(self, mesh, *callbacks):
        return ls.Trainer(
            lambda w, batch: (w - 0.1 * batch["x"].mean(), {"loss": batch["x"].sum()}),
            mesh=mesh,
            callbacks=callbacks,
            transfer_guard="error",
        )

    def test_names_the_batch_that_is_not_placed(self, mesh_of):
        trainer = self.trainer(mesh_of(4))
        placed = trainer.parallel.place_batch(batch())
        with pytest.raises(RuntimeError, match=r"batch\['x'\] \(float32\[8\]\) comes"):
            trainer.fit(0.0, [placed, batch()])

    def test_names_the_callback_and_the_step(self, mesh_of):
        def wasteful(info):
            jnp.asarray(np.ones(3))

        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed") as error:
            self.trainer(mesh_of(4), wasteful).fit(0.0, [batch()])
        notes = "\n".join(error.value.__notes__)
        assert "in wasteful at step 1" in notes
        assert "make the value once, before the training" in notes

    def test_refuses_another_word(self, mesh_of):
        with pytest.raises(ValueError, match="transfer_guard='warn'; it is None or"):
            ls.Trainer(lambda w, x: (w, None), transfer_guard="warn")

    def test_leaves_a_healthy_run_alone_with_all_callbacks(self, mesh_of, tmp_path):
        eval_step = lambda w, batch: {"loss": w + batch["x"].sum()}  # noqa: E731
        callbacks = ls.callbacks
        trainer = self.trainer(
            mesh_of(4),
            ls.every(2, callbacks.Log(ls.writers.JsonLines(tmp_path / "log"))),
            ls.every(2, callbacks.Evaluate(eval_step, [batch()] * 2)),
            callbacks.Progress(),
            callbacks.StopOnNonFinite(),
            callbacks.NanGuard(tmp_path, every=2),
            callbacks.CheckReplicas(),
        )
        w = trainer.fit(0.0, [batch()] * 6)
        assert float(w) == pytest.approx(-0.6)
