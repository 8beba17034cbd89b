"""Why a process failed: the lines that say so among all that it writes."""

import re

OWN = "lockstep: "
_LONGEST = 6  # lines of an error's message; what is longer is other output
_TRACEBACK = "Traceback (most recent call last):"
# What follows the line of a traceback that names the error.
_AFTER = re.compile(
    r"For simplicity, JAX has removed|-{20}$"
    r"|in .+ at step \d+$|then also: "  # notes of a Trainer
    r"|WARNING:|\S+:\d+: \w*Warning: "  # warnings are no cause
    r"|[ +|-]+\d*[ -]*$"  # lines between the errors of a group
)
_MARGIN = re.compile(r" *[+|] ")  # of an error in a group


class Cause:
    """Follows what a process writes to standard error.

    Attributes:
        told: the last line of lockstep's own, if any.

    Example:
        >>> cause = Cause()
        >>> for line in ("Traceback (most recent call last):", "  File x", "E: a", "b"):
        ...     cause.follow(line)
        >>> cause.text
        'E: a\\nb'
    """

    def __init__(self) -> None:
        """Nothing was written yet."""
        self.told = ""
        self._lines: list[str] = []
        self._in_traceback = self._in_message = False

    @property
    def text(self) -> str:
        """The message of the last traceback, or the last line where more came since."""
        return "\n".join(self._lines)

    def follow(self, line: str) -> None:
        """One more line."""
        if not line.strip() or _AFTER.match(line):
            return
        if line.startswith(OWN):
            self.told = line.strip()
        bare = _MARGIN.sub("", line, count=1)
        names_error = self._in_traceback and not bare.startswith(" ")
        self._in_traceback = bare.rstrip().endswith(_TRACEBACK) or (
            self._in_traceback and not names_error
        )
        goes_on = self._in_message and len(self._lines) < _LONGEST
        if names_error or self._in_traceback or line.startswith(OWN) or not goes_on:
            self._lines = []
            self._in_message = names_error
        self._lines.append(line.strip())
