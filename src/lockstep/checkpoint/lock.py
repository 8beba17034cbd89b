"""One run a folder: a second process that would write there as well is refused."""

import fcntl
import logging
import os
import socket
from pathlib import Path

_log = logging.getLogger("lockstep")


class Lock:
    """Holds a folder for the runs of this process.

    The system frees the lock of a process that ends, however it ends. It belongs to
    the process: a second run in this one may go on in the folder, and forked workers,
    which may live longer, do not hold it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "run.lock"
        self._file: int | None = None

    def take(self) -> None:
        """Hold the folder, which is there, until `release`.

        Raises:
            RuntimeError: a run of another process holds it; names the process.
        """
        if self._file is not None:
            return
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._file, 0)
            me = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(self._file, me.encode(), 0)
        except BlockingIOError as error:
            raise self._refused() from error
        except OSError as error:  # read-only, or a file system without locks
            _log.warning(
                "%s cannot be written or locked (%s): a save may fail, and a second "
                "run in the same folder would not be noticed",
                self._path,
                error,
            )

    def release(self) -> None:
        """Let another process go on in the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _refused(self) -> RuntimeError:
        assert self._file is not None
        holder = os.pread(self._file, 200, 0).decode(errors="replace")
        self.release()
        return RuntimeError(
            f"{self._path.parent} belongs to a run that is still going on "
            f"({holder or 'another process'}): two runs would delete each other's "
            "checkpoints. Wait until it has ended, end it, or give this run another "
            "directory"
        )
