"""The memory that a compiled program needs on each device."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes on each device while a program runs, as its compiler planned them.

    Attributes:
        arguments: all arguments, as they lie on one device.
        outputs: all outputs.
        reused: the part of the outputs that takes over memory of donated arguments.
        temporaries: what the program needs besides: activations, gradients.
    """

    arguments: int
    outputs: int
    reused: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Bytes that have to be free: all of these, what is reused once.

        Example:
            >>> Usage(arguments=100, outputs=90, reused=80, temporaries=50).peak
            160
        """
        return self.arguments + self.outputs - self.reused + self.temporaries


def measure(compiled: Any) -> Usage:
    """The memory of a `jax.stages.Compiled`.

    Raises:
        RuntimeError: the compiler of this backend does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError(
            "the compiler of this backend does not tell how much memory a program "
            "needs: look at debug.memory_now() while the step runs"
        )
    return Usage(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        reused=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


def in_units(nbytes: float) -> str:
    """A number of bytes with three digits and a unit.

    Example:
        >>> in_units(676), in_units(3.5 * 2**30)
        ('676 B', '3.5 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"
