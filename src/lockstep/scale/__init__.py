"""What a step would take on N devices, on paper: `lockstep scale`."""

from lockstep.scale.network import PRESETS, Link, Network
from lockstep.scale.predict import Prediction, Training, all_reduce_s, predict

__all__ = [
    "PRESETS",
    "Link",
    "Network",
    "Prediction",
    "Training",
    "all_reduce_s",
    "predict",
]
