"""One process of several: how it is started, and what it does first."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_LAUNCHER = "LOCKSTEP_LAUNCHER"


def start(
    index: int, count: int, port: int, restart: int, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start `lockstep run arguments...` as process `index` of `count`.

    It has a session of its own, so that its own children can be ended with it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", *arguments],
        env=environment(os.environ, index, count, port, restart),
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
        _LAUNCHER: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port on the loopback address that nobody listens on; a new one each time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def end_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies, whatever kills that."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before Linux was asked
        os.kill(os.getpid(), signal.SIGKILL)
