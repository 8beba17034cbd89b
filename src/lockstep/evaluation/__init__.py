"""A step over all batches: exact averages, and exactly the rows that went in."""

from lockstep.evaluation.evaluate_rows import evaluate, predict

__all__ = ["evaluate", "predict"]
