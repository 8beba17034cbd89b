"""From a loss and an optimizer to one step of a training run.

`make` reads the options, `train_step` is the step. What flows through it: `rows` opens
a batch, `loss` calls the user's function, `outcome` reads the result into sums,
`accumulate` adds up microbatches, `gradients` averages and clips. Around it:
`train_state`, `model_state` (BatchNorm in the device view), `scaling` (float16),
`fixed_shards` (the same bits on every device count) and the `conditions` for that.
"""

from lockstep.step.make import make_train_step
from lockstep.step.scaling import DynamicScale
from lockstep.step.train_state import TrainState
from lockstep.step.train_step import TrainStep

__all__ = ["DynamicScale", "TrainState", "TrainStep", "make_train_step"]
