"""One of the processes of `two_processes.py`: reads "steps", answers "ms a step"."""

import functools
import sys
import time

import jax
from workloads import WORKLOADS

import lockstep as ls
from lockstep.bench import handwritten


def by_lockstep(model, address, count, index):
    """Returns what trains for so many steps."""
    ls.initialize(address, count, index)
    work = WORKLOADS[model]()
    step = ls.make_train_step(
        work.loss, work.optimizer, axis_name="data", grad_norm=False
    )
    parallel = ls.per_device(step)
    state = parallel.place_state(step.init(work.params))
    own_rows = jax.tree.map(lambda x: x[index::count], work.batch)
    batch = parallel.place_batch(own_rows)

    def run(steps):
        nonlocal state
        for _ in range(steps):
            state, _ = parallel(state, batch)
        parallel.wait()

    return run


def by_hand(make, model, address, count, index):
    jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
    return make(WORKLOADS[model](), ls.make_mesh()).run


WAYS = {
    "lockstep": by_lockstep,
    "jit": functools.partial(by_hand, handwritten.jitted),
    "shard_map": functools.partial(by_hand, handwritten.sharded),
}


def main(way, model, address, count, index):
    jax.config.update("jax_platforms", "cpu")
    run = WAYS[way](model, address, int(count), int(index))
    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        run(steps)
        print("ms", 1e3 * (time.perf_counter() - start) / steps, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
