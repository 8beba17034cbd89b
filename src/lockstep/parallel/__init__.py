"""One step on every device, in two views.

`wrappers` is what people call; `parallel_step` is what they get. Behind it, `arguments`
places, `views` traces, `program` compiles, `padding` checks.
"""

from lockstep.parallel.parallel_step import ParallelStep
from lockstep.parallel.wrappers import as_parallel, parallelize, per_device

__all__ = ["ParallelStep", "as_parallel", "parallelize", "per_device"]
