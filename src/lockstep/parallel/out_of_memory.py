"""A step that runs out of memory says what it needs and what would save most."""

import textwrap
from typing import Any

import jax

_STATUS = "RESOURCE_EXHAUSTED"


def explain(
    error: BaseException, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Attach the memory report of a step to the error of its call.

    Other errors stay as they are. The report is made by compiling, which takes as long
    as the step's first compile did; what cannot be compiled is said so.
    """
    if _STATUS not in str(error):
        return
    # Only now: a run that fits never needs these.
    from lockstep.memory import examine, plan_call

    try:
        report = examine(plan_call(step, args, kwargs), compiling=False)
    except Exception as failure:
        error.add_note(f"no memory report: {type(failure).__name__}: {failure}")
        return
    actions = [f"{n}. {text}" for n, text in enumerate(report.actions, start=1)]
    lines = ["the next things to try:", *actions, _hint(step)]
    wrapped = [textwrap.fill(line, 88, subsequent_indent="   ") for line in lines]
    error.add_note("\n".join([str(report), *wrapped]))


def _hint(step: Any) -> str:
    """Where to look when the step itself should fit."""
    text = (
        "lockstep.debug.memory compiles these choices, lockstep.debug.largest_batch "
        "finds how many rows fit, lockstep.debug.memory_now shows what else is held"
    )
    mesh = getattr(step, "mesh", None)  # a mapped function of compat.pmap has none
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if device.platform == "gpu":
        text += (
            ". JAX takes 75 % of a GPU at its start (XLA_PYTHON_CLIENT_MEM_FRACTION); "
            "other processes on it, TensorFlow's data pipeline too, have the rest"
        )
    return text
