"""Callbacks for `Trainer(callbacks=[...])`.

A callback is anything that can be called with a `StepInfo`; it returns `True` to stop
the training after this step. So a function is one:

```python
def show(info):
    print(info.step, info.scalars())

trainer = ls.Trainer(step, callbacks=[ls.every(100, show)])
```

Callbacks run in the order of the list. What one finds out, it puts into
`info.results`, where later ones see it and `Log` writes it. The optional methods
`start`, `observe`, `finish` and `close` are described at `Callback`.
"""

from lockstep.callbacks.evaluating import Evaluate
from lockstep.callbacks.every import every
from lockstep.callbacks.log import Log
from lockstep.callbacks.nan_guard import NanGuard
from lockstep.callbacks.plot import Plot
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.stop import StopEarly, StopOnNonFinite
from lockstep.callbacks.watch import CheckReplicas, Inspect, Profile, WatchMemory
from lockstep.loop.running import Callback

__all__ = [
    "Callback",
    "CheckReplicas",
    "Evaluate",
    "Inspect",
    "Log",
    "NanGuard",
    "Plot",
    "Profile",
    "Progress",
    "StopEarly",
    "StopOnNonFinite",
    "WatchMemory",
    "every",
]
