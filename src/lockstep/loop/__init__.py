"""Many steps: the `Trainer`.

The loop itself is in `trainer`. `feed` brings the batches, `step_keys` the keys,
`running` calls the callbacks, and `contract` checks what the step takes and returns.
"""

from lockstep.loop.running import Callback
from lockstep.loop.trainer import StepInfo, Trainer

__all__ = ["Callback", "StepInfo", "Trainer"]
