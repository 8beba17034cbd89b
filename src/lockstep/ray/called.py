"""Runs a function in a worker's process: `python -m lockstep.ray.called FOLDER`.

The folder has the file `call`: the paths on which the function's modules are found,
then the function and its arguments. Process 0 leaves the file `result`.
"""

# Ray is an extra: where it is not installed, the checks know none of its names.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """The content of the file `call`.

    Raises:
        TypeError: the function or an argument cannot be sent to other processes.
    """
    from ray import cloudpickle

    try:
        return cloudpickle.dumps(sys.path) + cloudpickle.dumps((function, arguments))
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be sent to the workers ({error}): "
            "make arrays, devices and open files inside the function"
        ) from error


def main() -> None:
    """Call the function of the folder that is named on the command line."""
    from ray import cloudpickle

    folder = Path(sys.argv[1])
    with (folder / "call").open("rb") as file:
        paths = cloudpickle.load(file)
        sys.path += [path for path in paths if path not in sys.path]
        function, arguments = cloudpickle.load(file)
    value = function(*arguments)
    if os.environ["LOCKSTEP_PROCESS_ID"] != "0":
        return
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"what {getattr(function, '__name__', 'the function')} returned cannot be "
            f"sent back ({error}): return numbers or NumPy arrays (lockstep.to_host)"
        ) from error
    (folder / "result").write_bytes(data)


if __name__ == "__main__":
    main()
