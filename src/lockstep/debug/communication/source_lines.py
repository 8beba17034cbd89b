"""From `stack_frame_id=71` in a compiled text to a line of the user's code.

The text begins with four tables: file names, function names, places in files, and
frames, each of which names its place and the frame that called it. JAX 0.10 and 0.12
both print them, with the number of the calling frame one too high, so that 1 is none.
"""

import re
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = ("site-packages", "dist-packages", _PACKAGE)


class SourceLines:
    """The tables of one compiled text."""

    def __init__(self, text: str) -> None:
        """Read the tables; a text may lack them."""
        names = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
        self._files, self._functions, self._places, self._frames = (
            _table(text, name) for name in names
        )

    def of(self, frame: str) -> str | None:
        """`file:line (function)` of a frame, by its number in the text.

        The innermost line outside installed packages and lockstep is the user's own;
        where there is none the innermost of all is given.
        """
        calls = self._calls(frame)
        own = [call for call in calls if not any(x in call for x in _LIBRARIES)]
        if not calls:
            return None
        inner = calls[0]
        return own[0] if own and not _started_by(own[0], calls) else inner

    def _calls(self, frame: str) -> list[str]:
        """The calls that led to a frame, innermost first."""
        found: list[str] = []
        while frame in self._frames:
            fields = _fields(self._frames[frame])
            place = _fields(self._places.get(fields.get("file_location_id", ""), ""))
            file = self._files.get(place.get("file_name_id", ""), "?").strip('"')
            name = self._functions.get(place.get("function_name_id", ""), "?")
            name = name.strip('"').rpartition(".")[2]
            found.append(f"{file}:{place.get('line', '?')} ({name})")
            frame = str(int(fields.get("parent_frame_id", "1")) - 1)
        return found


def _started_by(call: str, calls: list[str]) -> bool:
    """Whether a line only calls the step: lockstep's wrapper is further in."""
    wrapper = str(Path(_PACKAGE) / "parallel")
    return any(wrapper in inner for inner in calls[: calls.index(call)])


def _table(text: str, name: str) -> dict[str, str]:
    match = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    rows = match[1].splitlines() if match else []
    return {number: rest for number, _, rest in (row.partition(" ") for row in rows)}


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", text))
