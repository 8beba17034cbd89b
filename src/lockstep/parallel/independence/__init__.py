"""Whether the rows of a batch are independent in a loss: `RowsCheck`.

`kinds` says what a value may know of the rows, `flow` and `shapes` carry that through a
jaxpr, `trial` runs what they cannot prove, `check` asks both.
"""

from lockstep.parallel.independence.check import RowsCheck

__all__ = ["RowsCheck"]
