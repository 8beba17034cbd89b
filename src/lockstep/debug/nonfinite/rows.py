"""Which rows make a step's numbers bad: found by leaving others out."""

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.debug.comparing.trials import Call
from lockstep.debug.nonfinite.alone import Alone

# A search takes two runs for each halving of the rows; this many rows are enough.
MOST_ROWS = 8


def find_rows(step: Alone, part: Call, is_bad: Callable[[Call], bool]) -> list[int]:
    """The rows of one device's part that make it bad, up to `MOST_ROWS` of them.

    Halves of the rows run in the place of all, filled up with rows that are known to
    be good, so that the shape stays and a mean over the rows is one of real rows.

    Returns:
        All rows, where any of them do it, and where no half does it alone.
    """
    count = step.rows(part)
    found: list[int] = []

    def bad(rows: Sequence[int], good: Sequence[int]) -> bool:
        filler = np.resize(np.array(good or rows), count - len(rows))
        return is_bad(step.pick(part, [*rows, *filler]))

    def search(rows: list[int], good: list[int]) -> None:
        if len(found) >= MOST_ROWS:
            return
        if len(rows) == 1:
            found.extend(rows)
            return
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        bad_first, bad_second = bad(first, good), bad(second, good)
        if not (bad_first or bad_second):  # only together
            found.extend(rows)
        if bad_first:
            search(first, good if bad_second else good + second)
        if bad_second:
            search(second, good if bad_first else good + first)

    search(list(range(count)), [])
    return sorted(found)
