"""One process of several: how it is started."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def start(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `lockstep run arguments...`.

    It has a session of its own, so that its own children can be ended with it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def environment(
    inherited: Mapping[str, str], index: int, count: int, port: int, restart: int
) -> dict[str, str]:
    """The variables of one process: what `initialize` reads, and who started it."""
    return {
        **inherited,
        "LOCKSTEP_COORDINATOR": f"127.0.0.1:{port}",
        "LOCKSTEP_NUM_PROCESSES": str(count),
        "LOCKSTEP_PROCESS_ID": str(index),
        "LOCKSTEP_LOCAL_COUNT": str(count),
        "LOCKSTEP_RESTART": str(restart),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port on the loopback address that nobody listens on; a new one each time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
