"""What went wrong in code of the user, in one line."""

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (
    _PACKAGE,
    "site-packages",
    "dist-packages",
    "<",
    sysconfig.get_path("stdlib"),
)


def in_one_line(error: BaseException) -> str:
    """The error, and the innermost line of the user's own code that led to it.

    Example:
        >>> in_one_line(KeyError("x"))
        "KeyError: 'x'"
        >>> in_one_line(ValueError("13 rows on 4 devices"))
        '13 rows on 4 devices'
    """
    text, kind = (str(error).strip().splitlines() or [""])[0], type(error).__name__
    if not isinstance(error, TypeError | ValueError):  # those explain themselves
        text = f"{kind}: {text}" if text else kind
    calls = traceback.extract_tb(error.__traceback__)
    own = [c for c in calls if not any(name in c.filename for name in _LIBRARIES)]
    if not own:
        return text
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})"
