"""Know at a glance that a call is like the last one, so that nothing is placed anew.

In a training loop every call after the first has its state from the call before and
its batch from the same placement. One pass over the leaves finds that out.
"""

import dataclasses
import operator
from typing import Any

import jax

from lockstep.parallel.program import Program
from lockstep.tree import identity, is_gone

_sharding = operator.attrgetter("sharding")
_is_deleted = operator.methodcaller("is_deleted")


@dataclasses.dataclass(frozen=True)
class LastCall:
    """The look of the last call's placed arguments, and the program that ran.

    Attributes:
        program: the program that ran.
        structure: the structure of all arguments.
        shardings: of every leaf; compared by identity, for the outputs of a program
            share their sharding objects from call to call.
        shapes: first axes of the arguments that may be keys, one a device.
    """

    program: Program
    structure: Any
    shardings: list[Any]
    shapes: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], program: Program, shapes: Any) -> "LastCall":
        """Remember a call; `args` are placed and wrapped."""
        leaves, structure = jax.tree.flatten(args)
        return cls(program, structure, [leaf.sharding for leaf in leaves], shapes)

    def is_like(self, args: tuple[Any, ...], shapes: Any) -> bool:
        """Whether these arguments can run as they are, without a second look."""
        leaves, structure = jax.tree.flatten(args)
        if structure != self.structure or shapes != self.shapes:
            return False
        try:  # without a loop in Python: a state may have hundreds of leaves
            if not all(map(operator.is_, map(_sharding, leaves), self.shardings)):
                return False
            if any(map(_is_deleted, leaves)):
                return False
        except AttributeError:  # a host value
            return False
        # A state is donated as a whole, so one look at its pieces is enough.
        if leaves and is_gone(leaves[0]):
            return False
        if len(set(map(identity, leaves))) < len(leaves):  # may be donated once only
            return False
        return not any(leaves[i].weak_type for i in self.program.strong)
