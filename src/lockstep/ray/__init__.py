"""Training on a Ray cluster: one process a worker, ended and started again together.

`fitting` has `fit` and its restarts, `attempt` watches the processes from the driver,
`crew` is what is asked of Ray, `worker` the actor on a node, and `called` runs a
function in a worker's process.
"""

from lockstep.ray.fitting import fit

__all__ = ["fit"]
