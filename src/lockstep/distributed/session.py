"""What `initialize` has set up in this process, for the modules that ask.

A process that runs alone has no session, and every question has its plain answer.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.distributed.detect import detect
from lockstep.distributed.hub import Hub
from lockstep.distributed.line import Line, leave
from lockstep.distributed.lookout import MAIN


@dataclasses.dataclass
class Session:
    """The connections and the settings of one run.

    Attributes:
        line: to all processes.
        hub: in process 0.
        arguments: what `initialize` was called with.
        broadcast: process 0's state wins where the processes start from others.
        check_data: whether host values are compared.
    """

    line: Line
    hub: Hub | None
    arguments: dict[str, Any]
    broadcast: bool
    check_data: bool


_session: Session | None = None
_channels: dict[tuple[str, tuple[int, ...]], int] = {}


def current() -> Session | None:
    """The session of this process."""
    return _session


def check_connected() -> None:
    """Refuse to train alone in a process that was started as one of several.

    Raises:
        RuntimeError: a launcher of lockstep started this process, and the script never
            called `initialize`.
    """
    if _session is None and jax.process_count() == 1:
        launched = (
            detect(os.environ) if "LOCKSTEP_NUM_PROCESSES" in os.environ else None
        )
        if launched is not None:
            raise RuntimeError(
                f"this is process {launched.index} of {launched.count}, started by "
                f"{launched.by}, and it is not connected with the others: each would "
                "train alone. Call lockstep.initialize() in the script's first line"
            )


def begin(session: Session) -> None:
    """From now on this is the session."""
    global _session
    _session = session


def leave_run(code: int) -> None:
    """End this process for good, process 0 after the others.

    They have JAX's connection to it, and would end with JAX's own, long message.
    """
    if _session is not None and _session.hub is not None:
        _session.hub.others_gone.wait(1.5)
    leave(code)


@functools.lru_cache(maxsize=64)
def group_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes whose devices are in a mesh."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def line() -> Line:
    """The line to the other processes of the run.

    Raises:
        RuntimeError: JAX connects several processes, and lockstep knows nothing of it.
    """
    if _session is None:
        raise RuntimeError(
            f"JAX runs in {jax.process_count()} processes, and lockstep cannot check "
            "that they do the same: call lockstep.initialize() in the place of "
            "jax.distributed.initialize()"
        )
    return _session.line


def new_channel(kind: str, group: tuple[int, ...]) -> str:
    """A channel that only this occasion uses; made in the same order everywhere."""
    count = _channels.get((kind, group), 0)
    _channels[kind, group] = count + 1
    return f"{kind} {count} {group}"


def exchange(
    value: Any,
    group: tuple[int, ...],
    *,
    what: str,
    channel: str = MAIN,
    cancelled: Callable[[], bool] | None = None,
) -> list[Any] | None:
    """The values of all processes of a group, in their order; see `Line.exchange`.

    Example:
        >>> exchange(5, (0,), what="five")
        [5]
    """
    if len(group) == 1:
        return [value]
    if channel == MAIN:
        channel = f"{channel} {group}"
    return line().exchange(channel, value, what=what, group=group, cancelled=cancelled)
