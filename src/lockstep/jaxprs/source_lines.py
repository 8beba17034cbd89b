"""The user's line that an equation of a jaxpr was written on."""

import dataclasses
import functools
import sysconfig
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """One line of a file; prints as `train.py:12 in loss`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def source_line(eqn: Any) -> SourceLine | None:
    """The innermost line that belongs neither to JAX nor to this package.

    A library's line is given where there is none of the user's own.

    Example:
        >>> def double(x):
        ...     return x + x
        >>> source_line(jax.make_jaxpr(double)(1.0).eqns[0]).function
        'double'
    """
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = traceback.frames if traceback else []
    outside = [f for f in frames if not f.file_name.startswith(_machinery())]
    own = [f for f in outside if not f.file_name.startswith(_libraries())]
    for frame in own or outside:
        function = frame.function_name.rpartition("<locals>.")[2]
        return SourceLine(_shown(frame.file_name), frame.line_num, function)
    return None


@functools.cache
def _machinery() -> tuple[str, ...]:
    """Folders of what stands between the user's line and the device."""
    import jaxlib

    folders = [Path(jax.__file__).parent, Path(jaxlib.__file__).parent]
    return tuple(f"{folder}/" for folder in (*folders, Path(__file__).parent))


@functools.cache
def _libraries() -> tuple[str, ...]:
    names = ("purelib", "platlib", "stdlib")
    return tuple({f"{sysconfig.get_path(name)}/" for name in names})


def _shown(file: str) -> str:
    """A path as short as it stays clear."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
