"""Times of contenders that take turns, so that a busy machine disturbs all alike.

The order of a round is drawn anew: who comes after a large model finds cold caches.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping

from lockstep.bench.contender import Contender
from lockstep.bench.failures import in_one_line
from lockstep.memory.usage import measure
from lockstep.notices import say_once

TURN_S = 0.1


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one contender.

    Attributes:
        name: the contender.
        ours: whether it is lockstep's.
        first_step_s: seconds from nothing to the end of the first step: placing,
            tracing, compiling, one step.
        step_ms: milliseconds a step, one number for each turn.
        nbytes: bytes on each device while the step runs; `None` if not asked for.
    """

    name: str
    ours: bool
    first_step_s: float
    step_ms: list[float]
    nbytes: int | None

    @property
    def median(self) -> float:
        """The median time of a step, in milliseconds."""
        return statistics.median(self.step_ms)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        if len(self.step_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_ms, n=4)
        return (high - low) / 2 / self.median


def take_turns(
    makers: Mapping[str, Callable[[], Contender]],
    *,
    turns: int,
    memory: bool = False,
    leave_out: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Time all contenders.

    Args:
        makers: name -> what makes the contender; making it is part of its time to the
            first step.
        turns: how often each of them gets its turn, of about `TURN_S` seconds.
        memory: whether to find out the memory too, which takes a further compile.
        leave_out: whether a contender that refuses the work or fails is left out,
            which is said, or ends everything.
        clock: seconds.

    Returns:
        One row each, in their order.
    """
    contenders, firsts = [], []
    left_out: dict[str, list[str]] = {}  # reason -> names
    for name, make in makers.items():
        start = clock()
        try:
            contender = make()
            contender.run(1)
        except Exception as error:
            if not leave_out:
                raise
            left_out.setdefault(in_one_line(error), []).append(name)
            continue
        firsts.append(clock() - start)
        contenders.append(contender)
    _say_who_is_left_out(left_out, len(makers))
    counts = [_steps_a_turn(contender, clock) for contender in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    order, draw = list(range(len(contenders))), random.Random(0)
    for _ in range(turns):
        draw.shuffle(order)
        for i in order:
            contenders[i].run(1)  # brings its memory back into the caches
            start = clock()
            contenders[i].run(counts[i])
            times[i].append(1e3 * (clock() - start) / counts[i])
    return [
        Row(c.name, c.ours, first, found, _bytes_of(c) if memory else None)
        for c, first, found in zip(contenders, firsts, times, strict=True)
    ]


def _say_who_is_left_out(reasons: Mapping[str, list[str]], ways: int) -> None:
    """`reasons`: reason -> the names of those that gave it."""
    for reason, names in reasons.items():
        who = "all ways" if len(names) == ways > 1 else "; ".join(names)
        are = "is" if len(names) == 1 else "are"
        text = f"{who} {are} left out: {reason}"
        say_once(f"bench {text}", text)


def _steps_a_turn(contender: Contender, clock: Callable[[], float]) -> int:
    contender.run(2)  # the second step of a run may still be a slow one
    start = clock()
    contender.run(2)
    return max(1, round(TURN_S / max((clock() - start) / 2, 1e-6)))


def _bytes_of(contender: Contender) -> int | None:
    if contender.compile is None:
        return None
    return measure(contender.compile()).peak
