"""Kill a run with SIGKILL at random moments, resume it, and compare every bit.

    python tests/soak/kill9.py --kills 50

Each time the run starts again on 1, 2, 4 or 8 simulated devices. It must go on from a
whole checkpoint, do no step differently the second time, see every row once an epoch,
and end with the bits of a run that nobody disturbed.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
DEVICES = (1, 2, 4, 8)
ROWS, BATCH = 64, 16
STEPS, SAVE_EVERY = 80, 2
MOST_STEPS_BETWEEN_KILLS = 9
PATIENCE_S = 300


def train(folder: Path, devices: int) -> None:
    """One process of the run: a line for each step, and a digest at the end."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import lockstep as ls

    ls.simulate_devices(devices)
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(ROWS, 6)).astype("f"), "id": np.arange(ROWS)}
    rows["y"] = np.sin(rows["x"].sum(1))
    params = {"a": rng.normal(size=(6, 8)).astype("f"), "b": np.ones(8, "f")}

    def loss(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return (kept * hidden @ params["b"] - batch["y"]) ** 2

    step = ls.make_train_step(
        loss, optax.adamw(1e-2), axis_name="data", fixed_shards=8, clip_norm=1.0
    )
    checkpoints = ls.Checkpointer(folder / "checkpoints", every=SAVE_EVERY, keep=2)
    trainer = ls.Trainer(step, key=jax.random.key(7), checkpoints=checkpoints)
    ids = []

    class Look:
        def before(self, step, args, kwargs):
            ids.append(np.asarray(args[1]["id"]).tolist())

        def after(self, *_):
            pass

    trainer.parallel.observers.append(Look())
    data = ls.data.batches(rows, global_batch_size=BATCH, seed=3)
    state = step.init(params)
    with open(folder / "steps.jsonl", "a") as log:
        for info in trainer.steps(state, data, steps=STEPS):
            value = np.asarray(info.metrics["loss"].total).tobytes().hex()
            line = {"step": info.step, "ids": ids[-1], "loss": value}
            log.write(json.dumps(line | {"devices": devices}) + "\n")
            log.flush()
    leaves = jax.tree.leaves(ls.to_host(trainer.state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    (folder / "digest").write_text(digest.hexdigest())


def start(folder: Path, devices: int) -> subprocess.Popen[str]:
    """The run in a process of its own; its notices go to `folder`."""
    settings = {
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output", "a") as output:
        return subprocess.Popen(
            [sys.executable, __file__, "--train", folder, str(devices)],
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def kill_somewhere(process: subprocess.Popen[str], folder: Path, dice) -> bool:
    """SIGKILL after a random number of steps and a random moment; was it in time?"""
    before, wanted = size_of(folder), dice.randint(1, MOST_STEPS_BETWEEN_KILLS)
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None and size_of(folder) < before + wanted:
        if time.monotonic() > until:
            break
        time.sleep(0.002)
    time.sleep(dice.random() * 0.1)
    process.kill()
    process.wait()
    if process.returncode not in (0, -9):
        fail(folder, f"a process ended by itself with {process.returncode}")
    return process.returncode == -9


def size_of(folder: Path) -> int:
    """Lines in the log of steps."""
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def steps_of(folder: Path) -> dict[int, set[str]]:
    """What was noted of each step, however often it ran."""
    noted = defaultdict(set)
    for text in (folder / "steps.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a process that was killed
            continue
        noted[line["step"]].add(json.dumps({k: line[k] for k in ("ids", "loss")}))
    return noted


def fail(folder: Path, why: str) -> None:
    """End with what the run has said last."""
    said = (folder / "output").read_text()[-4000:]
    raise SystemExit(f"FAILED: {why}\n--- the end of {folder / 'output'}:\n{said}")


def compare(calm: Path, killed: Path) -> None:
    """Check that both runs are one."""
    want, got = steps_of(calm), steps_of(killed)
    if got.keys() != want.keys():
        fail(killed, f"other steps ran: {sorted(want.keys() ^ got.keys())}")
    for step, noted in got.items():
        if noted != want[step]:
            fail(killed, f"step {step} was {want[step]}, and in the killed run {noted}")
    epochs = defaultdict(list)
    for step, (text,) in want.items():
        epochs[(step - 1) * BATCH // ROWS] += json.loads(text)["ids"]
    for epoch, ids in epochs.items():
        if len(ids) == ROWS and sorted(ids) != list(range(ROWS)):
            fail(killed, f"epoch {epoch} did not have every row once: {sorted(ids)}")
    if (calm / "digest").read_text() != (killed / "digest").read_text():
        fail(killed, "the last states differ")


def soak(kills: int, seed: int, folder: Path) -> str:
    """The whole trial; returns what happened in one line."""
    dice = random.Random(seed)
    calm = folder / "calm"
    if start(calm, 8).wait(PATIENCE_S) != 0:
        fail(calm, "the run that nobody disturbs failed")
    done, used = 0, []
    while done < kills:
        killed = folder / f"killed after {done}"
        while done < kills and not (killed / "digest").exists():
            used.append(dice.choice(DEVICES))
            done += kill_somewhere(start(killed, used[-1]), killed, dice)
        if start(killed, dice.choice(DEVICES)).wait(PATIENCE_S) != 0:
            fail(killed, "the run could not be resumed")
        compare(calm, killed)
    return (
        f"{done} kills, started on {used} devices: the same bits in every step and at "
        "the end, every row once an epoch"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        folder, devices = options.train
        train(Path(folder), int(devices))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(soak(options.kills, options.seed, Path(folder)))


if __name__ == "__main__":
    main()
