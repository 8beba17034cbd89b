"""One of the processes of `two_processes.py`: reads "steps", answers "ms a step"."""

import sys
import time

import jax
from workloads import WORKLOADS

import lockstep as ls


def main(model, address, processes, number):
    jax.config.update("jax_platforms", "cpu")
    ls.initialize(address, int(processes), int(number))
    work = WORKLOADS[model]()
    step = ls.make_train_step(work.loss, work.optimizer, axis_name="data")
    parallel = ls.per_device(step)
    state = parallel.place_state(step.init(work.params))
    batch = parallel.place_batch(
        jax.tree.map(lambda x: x[int(number) :: int(processes)], work.batch)
    )
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            state, _ = parallel(state, batch)
        parallel.wait()
        print("ms", 1e3 * (time.perf_counter() - start) / int(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
