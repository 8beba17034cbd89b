"""Whether the rows of a batch are independent in a loss: `RowsCheck`.

`parts` says what a loss sees at a time, `kinds` what a value may know of the rows.
`flow` and `shapes` carry that through a jaxpr, `trial` runs what they cannot prove,
`check` asks both.
"""

from lockstep.parallel.independence.check import RowsCheck

__all__ = ["RowsCheck"]
