"""One script for every launcher: alone, lockstep run, SLURM, mpirun, Ray, Kubernetes.

Started again with the same --run, it goes on from its newest checkpoint; told to stop
by SIGTERM, it finishes a step, saves, and ends with exit code 75.
"""

import argparse
import os

import lockstep as ls

# First: a process that was started as one of several joins the others. The machines of
# a cluster do not start at the same time.
ls.initialize(timeout_s=600)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

ROWS, WIDTH = 4096, 16


def loss(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def rows():
    """The same rows in every process; each reads its own share of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = x @ np.linspace(-1, 1, WIDTH) + 0.5 * rng.normal(size=ROWS)
    return {"x": x, "y": y.astype(np.float32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="run", help="folder that all processes see")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--save-every", type=int, default=200)
    options = parser.parse_args()

    step = ls.make_train_step(loss, optax.sgd(1e-2))
    trainer = ls.Trainer(
        step,
        checkpoints=ls.Checkpointer(
            os.path.join(options.run, "checkpoints"), every=options.save_every
        ),
    )
    state = step.init({"w": jnp.zeros(WIDTH), "b": jnp.zeros(())})
    batches = ls.data.batches(rows(), global_batch_size=64, seed=0)
    for info in trainer.steps(state, batches, steps=options.steps):
        if info.step % options.save_every == 0 and ls.is_main_process():
            print(f"step {info.step}: loss {info.scalars()['loss']:.7f}", flush=True)


if __name__ == "__main__":
    main()
