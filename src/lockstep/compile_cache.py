"""Compiled programs kept on disk, so that the next run does not compile them again."""

from pathlib import Path


def cache_compiles(directory: str | Path) -> None:
    """Keep every compiled program in a folder, and take it from there next time.

    It holds for the whole process, whoever compiles. A program is found again if the
    code, the shapes, the devices, JAX and its flags are the same. Several runs and
    processes may share a folder; nothing in it is ever deleted.

    Args:
        directory: made if it is not there.

    Raises:
        OSError: it cannot be made or written.

    Example: `ls.cache_compiles("run/compiled")` as the first line of a script.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    path = Path(directory).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    _check_writable(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX keeps only what took a second or more, unless it is told otherwise.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # it may be open on another folder, or closed


def _check_writable(path: Path) -> None:
    probe = path / ".lockstep-probe"
    probe.touch()
    probe.unlink()
