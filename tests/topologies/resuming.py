"""A training with checkpoints that is ended in one of its processes, and goes on.

`lockstep run --processes 2 resuming.py FOLDER KIND`: on its first attempt process 1
sends itself a signal, SIGTERM or SIGKILL, after step 12 of 20. The main process prints
the loss of each step in full.
"""

import os
import signal
import sys

import jax
import optax
from training import batches, loss, params

import lockstep as ls

FOLDER, KIND = sys.argv[1:]


def main() -> None:
    ls.initialize()
    fresh = not os.listdir(FOLDER)
    step = ls.make_train_step(loss, optax.adam(0.01), axis_name="data")
    checkpoints = ls.Checkpointer(FOLDER, every=5)
    trainer = ls.Trainer(ls.per_device(step, remainder="pad"), checkpoints=checkpoints)
    run = trainer.steps(step.init(params()), batches(trainer.mesh), steps=20)
    for info in run:
        if ls.is_main_process():
            print(f"loss {info.step} {info.scalars()['loss']!r}", flush=True)
        if fresh and KIND != "well" and info.step == 12 and jax.process_index() == 1:
            jax.block_until_ready(info.metrics)
            os.kill(os.getpid(), signal.Signals[KIND])


if __name__ == "__main__":
    main()
