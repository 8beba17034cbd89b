"""Checkpoints: a run that stops anywhere goes on from there, on any devices."""

from lockstep.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
