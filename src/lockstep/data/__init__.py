"""Batches: cut from rows in a reproducible order, and placed ahead of the loop."""

from lockstep.data.prefetching import Prefetch, prefetch
from lockstep.data.row_batches import Batches, batches

__all__ = ["Batches", "Prefetch", "batches", "prefetch"]
