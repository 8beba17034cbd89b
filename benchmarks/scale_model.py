"""`lockstep scale` against this machine: the step of 2 and 4 processes.

    python benchmarks/scale_model.py [--models deep mlp lm] [--turns 9]

Measured are the step in one process on one core, and all-reduces between two processes
with a core each (gloo, loopback). From these and the messages of the compiled step come
the predictions. Then more processes train, each on as many rows. Where several share a
core, all that they do takes so many times longer.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import time

import jax
from teams import CORES, Team
from workloads import WORKLOADS

import lockstep as ls
from lockstep.scale import Link, Network, Training, link, measured, predict

COUNTS = (2, 4)
STEP, REDUCE = "step", "reduce"


def train(model):
    work = WORKLOADS[model]()
    step = ls.make_train_step(
        work.loss, work.optimizer, axis_name="data", grad_norm=False
    )
    parallel = ls.per_device(step)
    state = parallel.place_state(step.init(work.params))
    batch = parallel.place_batch(work.batch)

    def milliseconds(steps):
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = parallel(state, batch)
        parallel.wait()
        return 1e3 * (time.perf_counter() - start) / steps

    return milliseconds


def reduce(_):
    mesh = ls.make_mesh()
    return lambda nbytes: 1e3 * link.all_reduce_s(mesh, nbytes, turns=3)


def work_for(kind, model, address, count, index):
    """One process: reads how many steps or bytes, answers with milliseconds."""
    os.sched_setaffinity(0, {int(index) % CORES})
    ls.initialize(address, int(count), int(index))
    milliseconds = {STEP: train, REDUCE: reduce}[kind](model)
    for line in sys.stdin:
        print("ms", milliseconds(int(line)), flush=True)


def measure(model, turns):
    """Median milliseconds, by the number of processes and by the bytes of a message."""
    steps, messages = {}, {}
    with contextlib.ExitStack() as cleanup:

        def start(kind, processes):
            team = Team((sys.executable, __file__, kind), model, processes)
            cleanup.callback(team.close)
            return team

        teams = {n: start(STEP, n) for n in (1, *COUNTS)}
        pair = start(REDUCE, 2)
        for team in teams.values():
            team.run(3)  # compiles
        often = {n: max(3, round(500 / team.run(5))) for n, team in teams.items()}
        turn = [*((steps, teams[n], n, often[n]) for n in teams)]
        turn += [(messages, pair, nbytes, nbytes) for nbytes in link.SIZES]
        draw = random.Random(0)
        for _ in range(turns):
            draw.shuffle(turn)
            for found, team, name, amount in turn:
                found.setdefault(name, []).append(team.run(amount))
    median = statistics.median
    return (
        {n: median(found) for n, found in steps.items()},
        {n: median(found) for n, found in sorted(messages.items())},
    )


def predicted(processes, compute_ms, line, nbytes, messages):
    share = max(1, processes / CORES)
    slowed = Link(line.latency_s * share, line.bandwidth / share)
    network = Network(1, slowed, slowed, "measured", ("ring",))
    training = Training(share * compute_ms / 1e3, nbytes, messages)
    [row] = predict(training, network, [processes])
    return 1e3 * row.step_s


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["deep", "mlp", "lm"])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    ls.simulate_devices(2)
    for model in options.models:
        steps, times = measure(model, options.turns)
        line = link.fit(list(times), [t / 1e3 for t in times.values()], devices=2)
        nbytes, messages = measured.all_reduced(WORKLOADS[model]())
        print(
            f"{model}: {steps[1]:.2f} ms a step alone, {nbytes:,} bytes in {messages} "
            f"messages; link {line.latency_s * 1e6:.0f} us, "
            f"{line.bandwidth / 1e9:.2f} GB/s"
        )
        for n in COUNTS:
            guess, found = predicted(n, steps[1], line, nbytes, messages), steps[n]
            print(
                f"  {n} processes: {guess:.2f} ms predicted, {found:.2f} measured",
                end="",
            )
            print(f", error {guess / found - 1:+.0%}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    work_for(*sys.argv[1:]) if sys.argv[1:2] in ([STEP], [REDUCE]) else main()
