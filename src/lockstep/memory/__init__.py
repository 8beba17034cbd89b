"""What a step needs on each device: measured by compiling it, never by running it.

`plan` describes a call, `usage` measures it, `choices` knows what would save memory,
`report` puts that into words, `search` finds the largest batch.
"""

from lockstep.memory.plan import Plan, plan_call
from lockstep.memory.report import MemoryReport, examine
from lockstep.memory.search import LargestBatch, find_largest
from lockstep.memory.usage import Usage, in_units

__all__ = [
    "LargestBatch",
    "MemoryReport",
    "Plan",
    "Usage",
    "examine",
    "find_largest",
    "in_units",
    "plan_call",
]
