"""Synchronous data-parallel training for JAX.

A training step that runs on one device runs on every device, the replicas stay
equal, and the numbers stay those of one device on the whole batch.

```python
import lockstep as ls

mesh = ls.make_mesh()                        # {'data': every device}
step = ls.parallelize(train_step, mesh)      # an unchanged single-device step
state = ls.replicate(state, mesh)
for batch in ls.prefetch(batches, mesh):
    state, metrics = step(state, batch)
ls.debug.check_replicas(state)
```

Importing this package starts no backend and changes no setting: every name is
loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep import (
        callbacks,
        compat,
        data,
        debug,
        distributed,
        ray,
        sharding,
        writers,
    )
    from lockstep.callbacks import every
    from lockstep.checkpoint import Checkpointer
    from lockstep.compile_cache import cache_compiles
    from lockstep.data import prefetch
    from lockstep.devices import describe_devices, make_mesh, simulate_devices
    from lockstep.distributed import initialize, is_main_process
    from lockstep.evaluation import evaluate, predict
    from lockstep.loop import Trainer
    from lockstep.metrics import Mean
    from lockstep.parallel import parallelize, per_device
    from lockstep.placement import pad_batch, replicate, shard_batch, to_host
    from lockstep.rng import device_key, step_key
    from lockstep.step import TrainState, make_train_step

_NAMESPACES = (
    "callbacks",
    "compat",
    "data",
    "debug",
    "distributed",
    "ray",
    "sharding",
    "writers",
)

_HOMES = {
    "Checkpointer": "checkpoint",
    "Mean": "metrics",
    "TrainState": "step",
    "Trainer": "loop",
    "cache_compiles": "compile_cache",
    "describe_devices": "devices",
    "device_key": "rng",
    "evaluate": "evaluation",
    "every": "callbacks",
    "initialize": "distributed",
    "is_main_process": "distributed",
    "make_mesh": "devices",
    "make_train_step": "step",
    "pad_batch": "placement",
    "parallelize": "parallel",
    "per_device": "parallel",
    "predict": "evaluation",
    "prefetch": "data",
    "replicate": "placement",
    "shard_batch": "placement",
    "simulate_devices": "devices",
    "step_key": "rng",
    "to_host": "placement",
}

__all__ = [
    "Checkpointer",
    "Mean",
    "TrainState",
    "Trainer",
    "cache_compiles",
    "callbacks",
    "compat",
    "data",
    "debug",
    "describe_devices",
    "device_key",
    "distributed",
    "evaluate",
    "every",
    "initialize",
    "is_main_process",
    "make_mesh",
    "make_train_step",
    "pad_batch",
    "parallelize",
    "per_device",
    "predict",
    "prefetch",
    "ray",
    "replicate",
    "shard_batch",
    "sharding",
    "simulate_devices",
    "step_key",
    "to_host",
    "writers",
]

__version__ = "0.1.0"


def __getattr__(name: str):
    """Loads a public name the first time that it is asked for (PEP 562)."""
    if name in _NAMESPACES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
