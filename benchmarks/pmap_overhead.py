"""What a call of `compat.pmap` costs beside `jax.pmap`, and `replicate` beside puts.

    python benchmarks/pmap_overhead.py [--rounds 200]

The state has 202 leaves, as that of a perceptron of 101 layers, and the step does
almost nothing with them, so that the call itself is what takes the time. The
contestants take turns call by call, so that a busy machine disturbs all of them alike;
the fastest call of each counts, for noise only ever adds.

- one process: 8 simulated devices; batches on the devices, and from the host;
- two processes of 4 devices each: arrays of the own process go in and come out;
- replicate: 64 MB of NumPy onto 8 devices, beside one put a device.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np

import lockstep as ls
from lockstep import compat

LAYERS = 101
ONE_PROCESS, TWO_PROCESSES, REPLICATE = 1.0, 1.5, 1.0  # goals, times the other


def step(state, batch):
    return jax.tree.map(lambda leaf: leaf + batch["x"][0], state)


def stacked_state(rows):
    w, b = np.ones((rows, 4, 4), np.float32), np.ones((rows, 4), np.float32)
    return {f"layer{i:03}": {"w": w, "b": b} for i in range(LAYERS)}


def fastest(contestants, rounds):
    """The shortest time of each, in ms; they take turns."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def report(title, best, goal):
    """Prints the times of theirs and of ours, and whether ours meets the goal."""
    (theirs, base), (ours, took) = best.items()
    verdict = "met" if took <= goal * base else "missed"
    print(
        f"{title:<36}{theirs} {base:7.2f} ms   {ours} {took:7.2f} ms   "
        f"{took / base:.2f} times (goal {goal}: {verdict})"
    )


def looped(mapped, state, batch):
    """A call that goes on from the state that the call before it left."""
    held = [mapped(state, batch)]

    def call():
        held[0] = mapped(held[0], batch)
        return held[0]

    return call


def time_calls(title, goal, rounds):
    rows = jax.local_device_count()
    host = {"x": np.ones((rows, 16), np.float32)}
    (placed,) = compat.prefetch_to_device([host], 1)
    for where, batch in (("on the devices", placed), ("from the host", host)):
        contestants = {}
        for name, pmap in (("jax.pmap", jax.pmap), ("compat.pmap", compat.pmap)):
            mapped = pmap(step, "batch", donate_argnums=0)
            contestants[name] = looped(mapped, stacked_state(rows), batch)
        best = fastest(contestants, rounds)
        if jax.process_index() == 0:
            report(f"{title}, batch {where}", best, goal)


def time_replicate(rounds):
    devices, x = jax.local_devices(), np.ones((16, 1 << 20), np.float32)
    contestants = {
        "puts": lambda: [jax.device_put(x, device) for device in devices],
        "replicate": lambda: compat.replicate(x),
    }
    report("64 MB onto 8 devices", fastest(contestants, rounds), REPLICATE)


def two_processes(rounds):
    """Starts this file twice more; the first of the two reports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, f"--rounds={rounds}", "--join", address, number],
            env=os.environ | settings,
        )
        for number in ("0", "1")
    ]
    for process in processes:
        process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"))
    options = parser.parse_args()
    if options.join:
        address, process = options.join
        jax.distributed.initialize(
            address,
            2,
            int(process),
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
        )
        time_calls("two processes", TWO_PROCESSES, options.rounds)
        return
    ls.simulate_devices(8)
    time_calls("one process", ONE_PROCESS, options.rounds)
    time_replicate(max(5, options.rounds // 20))
    two_processes(options.rounds)


if __name__ == "__main__":
    main()
