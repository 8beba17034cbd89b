"""Code of the pmap era on today's JAX."""

from lockstep.compat.install import install, installed, uninstall
from lockstep.compat.keys import refresh_keys, shard_prng_key
from lockstep.compat.known_outputs import partial_eval_by_shape
from lockstep.compat.padding import pad_shard_unpad
from lockstep.compat.pmap import pmap
from lockstep.compat.printing import debug_print
from lockstep.compat.scanning import scan_in_dim
from lockstep.compat.stacked import (
    device_put_replicated,
    device_put_sharded,
    get_metrics,
    onehot,
    prefetch_to_device,
    replicate,
    shard,
    stack_forest,
    unreplicate,
)

__all__ = [
    "debug_print",
    "device_put_replicated",
    "device_put_sharded",
    "get_metrics",
    "install",
    "installed",
    "onehot",
    "pad_shard_unpad",
    "partial_eval_by_shape",
    "pmap",
    "prefetch_to_device",
    "refresh_keys",
    "replicate",
    "scan_in_dim",
    "shard",
    "shard_prng_key",
    "stack_forest",
    "uninstall",
    "unreplicate",
]
