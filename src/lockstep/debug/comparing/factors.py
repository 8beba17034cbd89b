"""Is a difference one number times the right change? Then a sum stands for a mean."""

import numpy as np

from lockstep.debug.comparing.verdicts import Leaf


def factor_of(leaf: Leaf) -> float | None:
    """By which number the change of a leaf is multiplied, if it is by one number.

    A parameter after SGD is old - lr g, a moment is b old + (1 - b) g: with a gradient
    c times as large it is `c want + d old` with another number d, found together by
    least squares.
    """
    if leaf.verdict != "wrong" or not leaf.is_float or not np.isfinite(leaf.gap):
        return None
    want, got = (np.ravel(leaf.change(x)) for x in (leaf.want, leaf.got))
    if not want.any() or not np.isfinite(want).all():
        return None
    columns = [want]
    if leaf.old is not None and want.size > 2:
        columns.append(np.ravel(leaf.old))
    for count in range(1, len(columns) + 1):
        matrix = np.stack(columns[:count], axis=1)
        solution = np.linalg.lstsq(matrix, got, rcond=None)[0]
        rest = np.linalg.norm(got - matrix @ solution)
        slack = 0.5 if leaf.redraw else 0.01
        if rest <= slack * np.linalg.norm(got):
            return float(np.real(solution[0]))
    return None
