"""Ends what a launcher has started when the launcher itself is killed.

A launcher that gets SIGKILL ends nobody: its processes would train on unseen, and the
workers of their loaders for ever. So a tiny process of its own waits for that.
"""

import subprocess
import sys

# It reads the numbers of process groups until the launcher's end of the pipe closes.
_WAIT_AND_END = """
import os, sys
for group in sys.stdin.read().split():
    try:
        os.killpg(int(group), 9)
    except OSError:
        pass
"""


class Guard:
    """Waits for the death of this process, beside it.

    Example:
        >>> guard = Guard()
        >>> guard.release()
    """

    def __init__(self) -> None:
        """Start waiting; there is nobody to end yet."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT_AND_END],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what kills the launcher's group spares it
        )

    def watch(self, group: int) -> None:
        """From now on a process group is ended with this process."""
        assert self._process.stdin
        self._process.stdin.write(b"%d\n" % group)
        self._process.stdin.flush()

    def release(self) -> None:
        """Wait no longer, for the groups were ended."""
        self._process.kill()
        self._process.communicate()
