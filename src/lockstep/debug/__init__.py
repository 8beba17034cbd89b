"""See what goes wrong: a step that differs, replicas that differ, traffic, memory."""

from lockstep.debug.communication.collectives import collectives
from lockstep.debug.communication.report import Collectives
from lockstep.debug.comparing.compare import compare
from lockstep.debug.comparing.comparison import Comparison
from lockstep.debug.first_call import FirstCall
from lockstep.debug.hang_guard import hang_guard
from lockstep.debug.live_memory import LiveMemory, memory_now
from lockstep.debug.memory import largest_batch, memory
from lockstep.debug.no_transfers import no_transfers
from lockstep.debug.nonfinite.diagnosis import NonFinite, NonFiniteError
from lockstep.debug.nonfinite.guard import nan_guard
from lockstep.debug.nonfinite.replay import replay
from lockstep.debug.shapes import shapes
from lockstep.debug.show_sharding import show_sharding
from lockstep.memory import LargestBatch, MemoryReport
from lockstep.printing import print_per_device
from lockstep.replicas import ReplicaMismatch, check_replicas

__all__ = [
    "Collectives",
    "Comparison",
    "FirstCall",
    "LargestBatch",
    "LiveMemory",
    "MemoryReport",
    "NonFinite",
    "NonFiniteError",
    "ReplicaMismatch",
    "check_replicas",
    "collectives",
    "compare",
    "hang_guard",
    "largest_batch",
    "memory",
    "memory_now",
    "nan_guard",
    "no_transfers",
    "print_per_device",
    "replay",
    "shapes",
    "show_sharding",
]
