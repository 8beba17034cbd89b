"""`lockstep run --rehearse N`: the first step of a script, on 1 device and on N."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep import first_step


@contextmanager
def rehearsed(count: int) -> Iterator[None]:
    """Compares the first step that the program inside takes, and ends the program.

    That is the first call of any step of lockstep: of `parallelize` or `per_device`,
    or of a `Trainer`. It runs on 1 and on `count` devices with the program's own state
    and batch, and the report is printed.

    Raises:
        SystemExit: always; with 0 if both gave the same, 1 if not, and 2 if the program
            came to its end without a step.
    """
    codes: list[int] = []

    def visit(step: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        from lockstep.debug.comparing.compare import compare_call

        report = compare_call(step, args, keywords, (1, count))
        print(report, flush=True)
        codes.append(0 if report.same else 1)
        raise SystemExit(codes[0])

    first_step.visit_next(visit)
    try:
        yield
    except SystemExit as end:
        if end.code and not codes:  # the program's own failure
            raise
    finally:
        first_step.withdraw(visit)
    if codes:  # also of a program that catches everything
        raise SystemExit(codes[0])
    print(
        "lockstep run --rehearse: the program came to its end without a step of "
        "lockstep (parallelize, per_device, Trainer), so nothing was compared",
        file=sys.stderr,
    )
    raise SystemExit(2)
