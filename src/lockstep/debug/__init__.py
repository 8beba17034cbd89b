"""See what goes wrong: replicas that differ, shapes and where arrays lie."""

from lockstep.debug.shapes import shapes
from lockstep.replicas import ReplicaMismatch, check_replicas

__all__ = ["ReplicaMismatch", "check_replicas", "shapes"]
