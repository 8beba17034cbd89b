"""A contender: a way to train, ready to run so many more steps."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        name: how the table calls it.
        run: trains for so many steps from where it stands, and waits for the last.
        compile: makes the `jax.stages.Compiled` of its step, to read the memory from;
            `None` if it is not asked.
        ours: whether it is lockstep's.
    """

    name: str
    run: Callable[[int], Any]
    compile: Callable[[], Any] | None = None
    ours: bool = False
