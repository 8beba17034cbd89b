"""How long a save holds the loop up, beside one that waits until it is on the disk.

python benchmarks/checkpoints.py --mib 256
"""

import argparse
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import lockstep as ls


def times(checkpoints: ls.Checkpointer, state, first: int, *, wait: bool, turns: int):
    """Seconds until the loop goes on, for each of some saves; steps run between."""
    move = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.001, s), donate_argnums=0)
    found = []
    for step in range(first, first + turns):
        state = jax.block_until_ready(move(state))
        begin = time.perf_counter()
        checkpoints.save(step, state)
        if wait:
            checkpoints.wait()
        found.append(time.perf_counter() - begin)
        state = move(state)
        checkpoints.wait()
    return found, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    ls.simulate_devices(options.devices)
    rng = np.random.default_rng(0)
    rows = options.mib * 2**20 // 4 // 16 // 1024
    leaves = [rng.normal(size=(rows, 1024)).astype(np.float32) for _ in range(16)]
    state = ls.replicate([jnp.asarray(leaf) for leaf in leaves])
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = ls.Checkpointer(folder, keep=1)
        _, state = times(checkpoints, state, 0, wait=True, turns=1)
        whole, state = times(checkpoints, state, 10, wait=True, turns=options.turns)
        held, state = times(checkpoints, state, 20, wait=False, turns=options.turns)
        begin = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(state))
        restored = time.perf_counter() - begin
    ratio = statistics.median(held) / statistics.median(whole)
    print(f"{options.mib} MiB on {options.devices} devices, {options.turns} saves each")
    print(f"  a save that waits       {statistics.median(whole):6.3f} s")
    print(f"  a save holds the loop   {statistics.median(held):6.3f} s ({ratio:.2f} x)")
    print(f"  restore                 {restored:6.3f} s")


if __name__ == "__main__":
    main()
