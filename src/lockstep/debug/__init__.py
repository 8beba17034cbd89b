"""See what goes wrong: a step that differs, replicas that differ, shapes."""

from lockstep.debug.comparing.compare import compare
from lockstep.debug.comparing.comparison import Comparison
from lockstep.debug.nonfinite.diagnosis import NonFinite, NonFiniteError
from lockstep.debug.nonfinite.guard import nan_guard
from lockstep.debug.nonfinite.replay import replay
from lockstep.debug.shapes import shapes
from lockstep.replicas import ReplicaMismatch, check_replicas

__all__ = [
    "Comparison",
    "NonFinite",
    "NonFiniteError",
    "ReplicaMismatch",
    "check_replicas",
    "compare",
    "nan_guard",
    "replay",
    "shapes",
]
