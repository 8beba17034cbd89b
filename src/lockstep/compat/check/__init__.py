"""Reads programs of the pmap era, never runs them, and says what to change."""

from lockstep.compat.check.checker import check
from lockstep.compat.check.findings import Finding, Level
from lockstep.compat.check.reports import REPORTS

__all__ = ["REPORTS", "Finding", "Level", "check"]
