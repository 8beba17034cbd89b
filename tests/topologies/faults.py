"""A tiny job of several processes in which one thing goes wrong.

`lockstep run --processes N faults.py KIND PROCESS`: at step 5 the process PROCESS meets
with KIND. Each process prints the number of each step.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time

import jax
import numpy as np

import lockstep as ls

KIND, CULPRIT = sys.argv[1], int(sys.argv[2])


def meet_with(kind: str) -> None:
    if kind == "raise":
        raise ValueError("row 7 is bad")
    if kind == "exit":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "hang":
        time.sleep(600)
    if kind == "interrupt":
        raise KeyboardInterrupt


def batches():
    for i in range(10):
        if i == 5 and jax.process_index() == CULPRIT:
            time.sleep(599)
        yield np.ones(2, np.float32)


def train(checkpoints: ls.Checkpointer | None = None) -> None:
    trainer = ls.Trainer(lambda w, x: (w + x.mean(), {}), checkpoints=checkpoints)
    trainer.fit(np.float32(0), batches())


def train_with_checkpoints() -> None:
    folder = os.path.join(tempfile.gettempdir(), "lockstep-only-one-process-saves")
    train(ls.Checkpointer(folder) if jax.process_index() == CULPRIT else None)


def spawn() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print("the child:", child.exitcode)


LOOPS = {
    "hanging loader": train,
    "checkpoints": train_with_checkpoints,
    "spawn": spawn,
}


def main() -> None:
    limits = {"timeout_s": 30, "heartbeat_s": 8 if KIND == "stop" else 30}
    if "hang" in KIND:
        limits["hang_timeout_s"] = 4
    if KIND == "late":  # only to arrive: the others wait for a process that never comes
        limits["timeout_s"] = 4
        if int(os.environ["LOCKSTEP_PROCESS_ID"]) == CULPRIT:
            time.sleep(20)
    ls.initialize(**limits)
    if KIND in LOOPS:
        LOOPS[KIND]()
    step = ls.parallelize(lambda w, x: (w + x.mean(), x.sum()))
    me = jax.process_index()
    # On the devices beforehand: no rows are agreed on, as in a user's own loop.
    batch = ls.shard_batch(np.ones(jax.local_device_count(), np.float32))
    state = ls.replicate(0.0)
    if KIND == "skew" and me == CULPRIT:
        time.sleep(35)
    for i in range(1, 11):
        if i == 6 and me == CULPRIT and int(os.environ["LOCKSTEP_RESTART"]) == 0:
            if KIND == "early":
                break
            if KIND == "alone":
                ls.to_host(batch)
            meet_with(KIND)
        state, total = step(state, batch)
        print(f"step {i}: {float(total):g}", flush=True)
    print("the end", flush=True)


if __name__ == "__mp_main__":  # read again by a child, as scripts without a guard are
    ls.initialize()
if __name__ == "__main__":
    main()
