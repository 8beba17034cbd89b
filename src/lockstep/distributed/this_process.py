"""The processes of a run: which one this is, and what each of them holds."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Processes:
    """This process among the processes of the run; one alone is number 0 of 1."""

    index: int
    count: int
    local_devices: int
    devices: int

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


def processes() -> Processes:
    """What JAX knows about the processes of this run; starts the backend.

    Example:
        >>> print(processes())
        process 0 of 1
    """
    return Processes(
        index=jax.process_index(),
        count=jax.process_count(),
        local_devices=jax.local_device_count(),
        devices=jax.device_count(),
    )


def is_main_process() -> bool:
    """Whether this process is the one that prints, logs and writes files.

    Example:
        >>> is_main_process()
        True
    """
    return jax.process_index() == 0
