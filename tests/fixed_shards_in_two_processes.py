"""Training with fixed shards in one of two processes, two devices each.

`test_fixed_shards.py` starts it twice, with the coordinator's address and the number of
the process. It prints a digest of all bits of the trained state.
"""

import sys

import jax
from fixed_shards_models import digest, make, mlp_batches, mlp_loss, mlp_params

import lockstep as ls

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])


def own_rows(batch):
    """The half of the rows that is this process's own."""
    half = len(batch["y"]) // 2
    rows = slice(PROCESS * half, (PROCESS + 1) * half)
    return {name: values[rows] for name, values in batch.items()}


if __name__ == "__main__":
    ls.initialize(ADDRESS, 2, PROCESS)
    step = make(mlp_loss)
    parallel = ls.per_device(step)
    state = step.init(mlp_params(), key=jax.random.PRNGKey(3))
    for batch in mlp_batches():
        state, _ = parallel(state, own_rows(batch))
    print("digest:", digest(state))
