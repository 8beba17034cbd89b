"""Notices that are said once: what lockstep did on its own, and why."""

import logging
import threading

_logger = logging.getLogger("lockstep")
_lock = threading.Lock()
_said: set[str] = set()


def say_once(key: str, text: str, *, level: int = logging.WARNING) -> None:
    """Logs `text` on the logger `lockstep`, the first time that `key` is seen.

    Python shows warnings when nobody configured logging, so that is the level of
    everything a person must not miss. Of several processes, what all have to say is
    said by process 0 alone.

    Args:
        key: names the occasion; a second notice with this key is left out.
        text: what happened, why, and what to do if it was not meant.
        level: a level of `logging`.

    Example:
        >>> say_once("a key", "placed the state on 8 devices")
        >>> say_once("a key", "not said again")
    """
    with _lock:
        if key in _said:
            return
        _said.add(key)
    _logger.log(level, text)


def reset() -> None:
    """Forgets what was said, so that a test hears it again."""
    with _lock:
        _said.clear()
