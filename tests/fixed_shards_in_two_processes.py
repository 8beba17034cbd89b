"""Training with fixed shards in one of two processes, two devices each.

`test_fixed_shards.py` starts it twice, with the coordinator's address and the number of
the process. It prints a digest of all bits of the trained state.
"""

import sys

import jax
from fixed_shards_models import digest, make, mlp_batches, mlp_loss, mlp_params
from jax.sharding import NamedSharding, PartitionSpec

import lockstep as ls

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])


def place(batch, mesh):
    """Half of the rows is this process's own."""
    half = len(batch["y"]) // 2
    rows = slice(PROCESS * half, (PROCESS + 1) * half)
    where = NamedSharding(mesh, PartitionSpec("data"))
    join = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: join(where, x[rows]), batch)


if __name__ == "__main__":
    jax.distributed.initialize(ADDRESS, num_processes=2, process_id=PROCESS)
    step = make(mlp_loss)
    parallel = ls.per_device(step)
    state = step.init(mlp_params(), key=jax.random.PRNGKey(3))
    for batch in mlp_batches():
        state, _ = parallel(state, place(batch, parallel.mesh))
    print("digest:", digest(state))
