"""Host to devices and back: replicate a state, shard a batch, read a tree."""

from lockstep.placement.batches import (
    Layout,
    Unplaced,
    agree_on_rows,
    place_batch,
    shard_batch,
)
from lockstep.placement.host_batches import (
    REMAINDERS,
    MaskedBatch,
    check_batch,
    check_registered,
    count_rows,
    map_named,
    pad_batch,
    take_rows,
)
from lockstep.placement.leaves import check_fits, copy_to, own_memory, put, put_whole
from lockstep.placement.states import replicate, to_host

__all__ = [
    "REMAINDERS",
    "Layout",
    "MaskedBatch",
    "Unplaced",
    "agree_on_rows",
    "check_batch",
    "check_fits",
    "check_registered",
    "copy_to",
    "count_rows",
    "map_named",
    "own_memory",
    "pad_batch",
    "place_batch",
    "put",
    "put_whole",
    "replicate",
    "shard_batch",
    "take_rows",
    "to_host",
]
