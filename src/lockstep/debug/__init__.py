"""See what goes wrong: a step that differs, replicas that differ, shapes."""

from lockstep.debug.comparing.compare import compare
from lockstep.debug.comparing.comparison import Comparison
from lockstep.debug.shapes import shapes
from lockstep.replicas import ReplicaMismatch, check_replicas

__all__ = ["Comparison", "ReplicaMismatch", "check_replicas", "compare", "shapes"]
