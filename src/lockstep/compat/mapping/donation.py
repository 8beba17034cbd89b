"""Donated arrays that are passed twice: an array can be given away only once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from lockstep import notices
from lockstep.tree import identity


def each_its_own(
    leaves: list[Any],
    donated: Sequence[int],
    describe: Callable[[list[Any]], tuple[str, list[str]]],
) -> list[Any]:
    """The leaves, with a copy where a donated one stands at another position too.

    An average of parameters that starts as the parameters is the usual case. XLA
    refuses such a call, or crashes in it.

    Args:
        leaves: of the arguments, as the caller passed them.
        donated: the positions of those that the program may take.
        describe: gives the function's name and the paths of the leaves, for the
            message, which is said once.
    """
    if not donated or len(set(map(identity, leaves))) == len(leaves):
        return leaves
    kept = set(range(len(leaves))) - set(donated)
    first = {identity(leaves[position]): position for position in kept}
    own = list(leaves)
    for position in donated:
        other = first.setdefault(identity(leaf := leaves[position]), position)
        if other != position and _is_array(leaf):
            own[position] = leaf.copy()
            _tell(position, other, *describe(leaves))
    return own


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _tell(position: int, other: int, function: str, names: list[str]) -> None:
    notices.say_once(
        f"compat.pmap donated twice in {function}",
        f"pmap({function}) is to give away {names[position]}, which is the same array "
        f"as {names[other]}: it is copied before the call; make it an array of its "
        "own, as in jax.tree.map(jax.numpy.copy, params)",
    )
