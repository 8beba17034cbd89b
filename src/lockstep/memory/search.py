"""The largest batch that fits, found by compiling."""

import dataclasses
from collections.abc import Callable

from lockstep.memory.plan import Plan
from lockstep.memory.usage import in_units


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits into a limit.

    Attributes:
        rows: of the global batch.
        devices: over how many devices they are split.
        peak: bytes that a step of so many rows needs on each device.
        next_rows: the next number of rows that the devices can share; `None` when no
            limit was met up to `rows`.
        next_peak: what those would need.
        limit_bytes: the limit.
        compiles: how many programs were compiled.
    """

    rows: int
    devices: int
    peak: int
    next_rows: int | None
    next_peak: int
    limit_bytes: int
    compiles: int

    def __str__(self) -> str:
        """As `96 rows (12 on each of 8 devices) need 1.2 GiB of 1.3 GiB`."""
        text = (
            f"{self.rows} rows ({self.rows // self.devices} on each of {self.devices} "
            f"devices) need {in_units(self.peak)} of {in_units(self.limit_bytes)} a "
            "device"
        )
        if self.next_rows is None:
            return f"{text}; more were not tried"
        return f"{text}; {self.next_rows} rows would need {in_units(self.next_peak)}"

    __repr__ = __str__


def find_largest(plan: Plan, limit_bytes: int, max_rows: int) -> LargestBatch:
    """Search among the multiples of the plan's unit.

    Memory grows nearly in proportion to the rows, so the line through two sizes tells
    where to look; halving the interval ends what that leaves open.

    Raises:
        ValueError: even the smallest batch is above the limit.
    """
    unit, peaks = plan.unit, {}

    def peak(count: int) -> int:
        if count not in peaks:
            peaks[count] = plan.with_rows(count * unit).usage().peak
        return peaks[count]

    if peak(1) > limit_bytes:
        raise ValueError(
            f"even {unit} rows, {unit // plan.devices} on each of {plan.devices} "
            f"devices, need {in_units(peak(1))} a device, and the limit is "
            f"{in_units(limit_bytes)}: the batch is not what takes the memory; "
            "debug.memory(step, state, batch) tells what does, and what would save most"
        )
    fits, fails = _narrow(peak, limit_bytes, max(max_rows // unit, 1))
    return LargestBatch(
        rows=fits * unit,
        devices=plan.devices,
        peak=peak(fits),
        next_rows=fails * unit if fails else None,
        next_peak=peak(fails) if fails else 0,
        limit_bytes=limit_bytes,
        compiles=len(peaks),
    )


def _narrow(
    peak: Callable[[int], int], limit: int, most: int
) -> tuple[int, int | None]:
    """The largest count that fits, and the next one, which does not."""
    fits, fails, inside = 1, None, 0
    while fits < most and (fails is None or fails - fits > 1):
        other = fails or 1
        slope = (peak(fits) - peak(other)) / (fits - other) if fits != other else 0
        guess = fits + int((limit - peak(fits)) / slope) if slope > 0 else 2 * fits
        if fails is None:
            guess = min(guess, most, 16 * fits)
        else:
            inside += 1
            if inside % 3 == 0:  # two guesses along the line, then halve
                guess = (fits + fails) // 2
            guess = min(guess, fails - 1)
        guess = max(guess, fits + 1)
        if peak(guess) <= limit:
            fits = guess
        else:
            fails = guess
    return fits, fails
