"""Compiled programs kept on disk, so that the next run does not compile them again."""

import os
import tempfile
from math import inf
from pathlib import Path

from lockstep.notices import say_once


def cache_compiles(directory: str | os.PathLike[str]) -> None:
    """Keep every compiled program in a folder, and take it from there next time.

    It holds for the whole process, whoever compiles. A program is found again if the
    code, the shapes, the devices, JAX and its flags are the same. Several runs and
    processes may share a folder; nothing in it is ever deleted. A folder that cannot be
    written is only read, which is said.

    A run that was killed while it wrote may leave half a program. JAX then warns of an
    "Error reading persistent compilation cache entry" in each run, and compiles it
    without replacing it: delete the files that begin with the name in the warning.

    Args:
        directory: made if it is not there.

    Raises:
        OSError: it cannot be made or read.
        TypeError: not a path.
        ValueError: an empty path, or that of a file.

    Example: `ls.cache_compiles("run/compiled")` as the first line of a script.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    path = _folder(directory)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX keeps only what took a second or more, unless it is told otherwise.
    shortest_s = 0.0 if _is_writable(path) else inf
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest_s)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # it may be open on another folder, or closed


def _folder(directory: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there."""
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"the folder for compiled programs is a {type(directory).__name__}: give "
            "its path, as cache_compiles('run/compiled')"
        )
    if not os.fspath(directory):
        raise ValueError(
            "the path of the folder for compiled programs is empty: give one, as "
            "cache_compiles('run/compiled'), or '.' for this folder"
        )
    path = Path(directory).expanduser().resolve()
    if path.is_file():
        raise ValueError(f"{path} is a file: compiled programs need a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the folder {path} for compiled programs cannot be made: {error.strerror}"
        ) from error
    return path


def _is_writable(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError as error:
        if not os.access(path, os.R_OK | os.X_OK):
            raise OSError(
                f"the folder {path} for compiled programs can be neither read nor "
                f"written: {error.strerror}"
            ) from error
        say_once(
            f"read-only compile cache {path}",
            f"the folder {path} cannot be written ({error.strerror}): programs are "
            "taken from it, and new ones are not kept",
        )
        return False
