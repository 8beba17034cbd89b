"""`replay`: a saved call once more, on one device."""

from pathlib import Path
from typing import Any

from lockstep.debug.nonfinite import record
from lockstep.debug.nonfinite.alone import alone
from lockstep.debug.nonfinite.diagnosis import NonFinite, diagnose
from lockstep.parallel import as_parallel


def replay(directory: str | Path, step: Any, *args: Any, **kwargs: Any) -> NonFinite:
    """Repeat the call that `nan_guard` saved, and say again where it goes wrong.

    `lockstep replay DIR` does it for a script: it runs the script as far as its first
    step. Elsewhere, as in a notebook, call this.

    Args:
        directory: the folder that the report names.
        step: the step, perhaps with a repair in it.
        *args: arguments like those of the saved call; their values are replaced.
        **kwargs: keyword arguments, also replaced.

    Returns:
        What is known now; `leaves` is empty when all is finite.

    Raises:
        ValueError: nothing saved there, or the arguments are of another form.
    """
    if not hasattr(step, "observers"):
        step = as_parallel(step)
    one = alone(step)
    call = record.restore(directory, one.read(args, kwargs))
    return diagnose(one, call, record.read(directory)["step"])
