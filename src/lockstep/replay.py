"""`lockstep replay DIR`: a step that was not finite, once more, on one device.

The program that saved it runs again, as far as its first step of that name. This
gives the function and the form of its arguments; the values are the saved ones.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lockstep import launch, observers


class CannotReplay(Exception):
    """There is nothing that could be run."""


def replay(directory: Path) -> None:
    """Runs the program that saved a call, repeats the call, and ends the program.

    Raises:
        CannotReplay: nothing is saved there, or not by a script.
        SystemExit: else; with 1 if the step is still not finite, 0 if it is finite now,
            and 2 if the program came to its end without such a step.
    """
    from lockstep.debug.nonfinite import record

    directory = directory.resolve()
    try:
        saved = record.read(directory)
    except ValueError as error:
        raise CannotReplay(str(error)) from None
    program = saved["program"]
    if program is None:
        raise CannotReplay(
            f"{directory} was saved in a notebook or at a prompt, which cannot be run "
            f"again: call lockstep.debug.replay({str(directory)!r}, step, state, "
            "batch) there"
        )
    os.chdir(program["folder"])
    with ExitStack() as setup:
        if saved["platform"] == "cpu" and saved["devices"] > 1:
            setup.enter_context(launch.simulated(saved["devices"]))
        if program["compat"]:
            from lockstep.compat import install

            install()
        setup.enter_context(_repeating(directory, saved["function"]))
        launch.run(
            launch.Program(
                program["target"], tuple(program["arguments"]), program["module"]
            )
        )


@contextmanager
def _repeating(directory: Path, name: str) -> Iterator[None]:
    repeat = _Repeat(directory, name)
    with observers.watching(repeat):
        try:
            yield
        except SystemExit as end:
            if end.code and repeat.code is None:  # the program's own failure
                raise
    if repeat.code is None:
        print(
            f"lockstep replay: the program came to its end without a step {name}, so "
            "nothing was repeated",
            file=sys.stderr,
        )
        raise SystemExit(2)
    raise SystemExit(repeat.code)


class _Repeat:
    """An observer that waits for a step of one name, and repeats the call with it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self.code: int | None = None

    def before(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The program is about to take a step."""
        if step.compiles.name != self._name:
            return
        from lockstep.debug import replay

        step.observers.clear()
        report = replay(self._directory, step, *args, **kwargs)
        print(report, flush=True)
        self.code = 1 if report.leaves else 0
        raise SystemExit(self.code)

    def after(self, step: Any, outputs: Any) -> None:
        """Another step ran."""
