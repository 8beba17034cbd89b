"""What the loop costs: `Trainer.fit` beside the bare compiled step, on a 1 ms step.

    python benchmarks/loop_overhead.py [--devices 4] [--steps 150] [--rounds 30]

All rows train the same model on the same batches. They run in turns, so that whatever
else the machine does hits them alike, and the medians over the rounds are compared.

- bare step: the jitted step called in a Python loop, batches already on the devices,
  at most 2 calls in flight, the state donated;
- parallelize: the same loop around `ls.parallelize(step)`;
- Trainer.fit: on batches already on the devices, without callbacks;
- with callbacks: also `Log` every 50 steps and `StopOnNonFinite`;
- from the host: `Trainer.fit` on NumPy batches, with placing and prefetch.
"""

import argparse
import collections
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import lockstep as ls

GOAL = 1.05
ROWS, FEATURES = 256, 128


def train_step(state, batch):
    """A small MLP, sized to take about 1 ms."""

    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), {"loss": loss}


def bounded_loop(step, state, batches, steps):
    """The loop that a careful person would write by hand."""
    in_flight = collections.deque()
    for i in range(steps):
        state, metrics = step(state, batches[i % len(batches)])
        in_flight.append(metrics["loss"])
        if len(in_flight) > 2:
            in_flight.popleft().block_until_ready()
    return state


class Nowhere:
    """A writer that keeps nothing."""

    def write(self, step, scalars):
        pass


def contestants(mesh, steps):
    """Name -> a function that trains for `steps` steps from the same state."""
    rng = np.random.default_rng(0)
    hosts = [
        {
            "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": rng.normal(size=(ROWS, 1)).astype(np.float32),
        }
        for _ in range(8)
    ]
    placed = [ls.shard_batch(batch, mesh) for batch in hosts]
    start = {
        "in": (0.1 * rng.normal(size=(FEATURES, 4 * FEATURES))).astype(np.float32),
        "out": (0.1 * rng.normal(size=(4 * FEATURES, 1))).astype(np.float32),
    }
    everywhere = ls.sharding.replicated(mesh)
    bare = jax.jit(train_step, donate_argnums=0, out_shardings=everywhere)
    wrapped = ls.parallelize(train_step, mesh)
    plain = ls.Trainer(wrapped)
    callbacks = [
        ls.every(50, ls.callbacks.Log(Nowhere())),
        ls.callbacks.StopOnNonFinite(),
    ]
    logged = ls.Trainer(wrapped, callbacks=callbacks)

    def fresh():
        return ls.replicate(start, mesh)

    return fresh, {
        "bare step": lambda state: bounded_loop(bare, state, placed, steps),
        "parallelize": lambda state: bounded_loop(wrapped, state, placed, steps),
        "Trainer.fit": lambda state: plain.fit(state, placed, steps=steps),
        "with callbacks": lambda state: logged.fit(state, placed, steps=steps),
        "from the host": lambda state: plain.fit(state, hosts, steps=steps),
    }


def measure(fresh, runs, steps, rounds):
    """Milliseconds a step, one number a round; the rows take turns."""
    times = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            state = jax.block_until_ready(fresh())
            start = time.perf_counter()
            jax.block_until_ready(run(state))
            times[name].append(1e3 * (time.perf_counter() - start) / steps)
    return {name: values[1:] for name, values in times.items()}  # the first compiles


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4, help="simulated CPU devices")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    ls.simulate_devices(options.devices)
    mesh = ls.make_mesh()
    fresh, runs = contestants(mesh, options.steps)
    times = measure(fresh, runs, options.steps, options.rounds)
    base = statistics.median(times["bare step"])
    print(f"{mesh.size} devices, {options.rounds} rounds of {options.steps} steps")
    for name, values in times.items():
        middle = statistics.median(values)
        low, high = min(values), max(values)
        print(
            f"{name:15} {middle:7.3f} ms a step ({low:.3f} to {high:.3f})"
            f"  {middle / base:5.3f} x bare"
        )
    ratio = statistics.median(times["Trainer.fit"]) / base
    verdict = "met" if ratio <= GOAL else "missed"
    print(f"goal: Trainer.fit <= {GOAL} x the bare step: {verdict} ({ratio:.3f})")


if __name__ == "__main__":
    main()
