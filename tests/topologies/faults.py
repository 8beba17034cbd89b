"""A tiny job of several processes in which one thing goes wrong.

`lockstep run --processes N faults.py KIND PROCESS`: the process PROCESS meets with
KIND, at step 6 if not before. Each process prints the number of each step.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import lockstep as ls

KIND, CULPRIT = sys.argv[1], int(sys.argv[2])
ME = int(os.environ.get("LOCKSTEP_PROCESS_ID", -1))

LIMITS = {
    "stop": {"heartbeat_s": 8},
    "late": {"timeout_s": 4},
    "hang": {"hang_timeout_s": 4},
    "hanging loader": {"hang_timeout_s": 4},
}


def send(number):
    return lambda: os.kill(os.getpid(), number)


def fill_the_disk():
    with open("/dev/full", "w") as full:
        full.write("x")


def fail():
    raise ValueError("row 7 is bad")


def recurse():
    return recurse() + 1


def batch_of(rows):
    """On the devices beforehand: no rows are agreed on, as in a user's own loop."""
    where = jax.sharding.NamedSharding(ls.make_mesh(), jax.P("data"))
    return jax.make_array_from_process_local_data(where, np.ones(rows, np.float32))


def gather():
    ls.to_host(batch_of(1))


def save():
    folder = tempfile.mkdtemp()
    ls.Checkpointer(folder).save(5, {"w": batch_of(1)})


def compare():
    ls.debug.check_replicas(batch_of(1))


def add_up_alone():
    """Not by lockstep, which knows nothing of it."""
    everywhere = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}

    def total(x):
        return jax.lax.psum(x, "data")

    jax.shard_map(total, mesh=ls.make_mesh(), **everywhere)(np.ones(999, np.float32))


AT_STEP_6 = {
    "raise": fail,
    "recursion": recurse,
    "disk": fill_the_disk,
    "exit": lambda: sys.exit(3),
    "early": lambda: sys.exit(0),
    "leave": lambda: os._exit(3),
    "leave with 0": lambda: os._exit(0),
    "abort": os.abort,
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "terminate": send(signal.SIGTERM),
    "own handler": send(signal.SIGTERM),
    "interrupt": send(signal.SIGINT),
    "hang": lambda: time.sleep(600),
    "slow": lambda: time.sleep(33),
    "alone": gather,
    "saves alone": save,
    "compares alone": compare,
    "own collective": add_up_alone,
    "twice": lambda: ls.initialize(timeout_s=7),
}

BEFORE_INITIALIZE = {
    "absent": lambda: sys.exit(0),
    "import": lambda: __import__("a_module_that_is_not_there"),
    "late": lambda: time.sleep(20),
    "started": lambda: jnp.ones(3),
    "devices": lambda: jax.config.update("jax_num_cpu_devices", 2),
    "own handler": lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)),
}


def loss_in_the_first_compile(w, x):
    """What is traced once, and differs where something is wrong with it."""
    if KIND == "compile" and ME == CULPRIT:
        threading.Timer(0.2, send(signal.SIGINT)).start()
        time.sleep(30)
    return w + x.mean() * (2.0 if KIND == "constant" and ME == CULPRIT else 1.0)


def take_steps() -> None:
    step = ls.parallelize(lambda w, x: (loss_in_the_first_compile(w, x), x.sum()))
    batch = batch_of(1 + (KIND == "shape" and ME == CULPRIT))
    state = ls.replicate(0.0)
    if KIND == "skew" and ME == CULPRIT:
        time.sleep(35)
    for i in range(1, 11):
        if i == 6 and ME == CULPRIT and int(os.environ["LOCKSTEP_RESTART"]) == 0:
            AT_STEP_6.get(KIND, lambda: None)()
        state, total = step(state, batch)
        print(f"step {i}: {float(total):g}", flush=True)


def batches():
    for i in range(10):
        if KIND == "hanging loader" and i == 5 and ME == CULPRIT:
            time.sleep(599)
        yield np.ones(1, np.float32)


def train(**settings) -> None:
    trainer = ls.Trainer(lambda w, x: (w + x.mean(), {}), **settings)
    trainer.fit(np.float32(0), batches())


def train_with_checkpoints() -> None:
    folder = os.path.join(tempfile.gettempdir(), "lockstep-only-one-process-saves")
    train(checkpoints=ls.Checkpointer(folder) if ME == CULPRIT else None)


def train_with_a_validation() -> None:
    valid = [np.ones(1, np.float32)]
    evaluate = ls.callbacks.Evaluate(lambda w, x: {"x": x}, valid)
    train(callbacks=[ls.every(5, evaluate)] if ME == CULPRIT else [])


def spawn() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print("the child:", child.exitcode)


PROGRAMS = {
    "hanging loader": train,
    "checkpoints": train_with_checkpoints,
    "validation": train_with_a_validation,
    "spawn": spawn,
    "different": lambda: ls.replicate(0.0) if ME == CULPRIT else gather(),
}


def main() -> None:
    if ME == CULPRIT:
        BEFORE_INITIALIZE.get(KIND, lambda: None)()
    ls.initialize(**{"timeout_s": 30} | LIMITS.get(KIND, {}))
    PROGRAMS.get(KIND, take_steps)()
    print("the end", flush=True)


if __name__ == "__mp_main__":  # read again by a child, as scripts without a guard are
    ls.initialize()
if __name__ == "__main__":
    main()
