"""Bounded run-ahead: at most two calls of a step are in flight.

Without a bound, memory grows with every call that the host is ahead of the devices,
and simulated devices abort the process.
"""

import collections
from typing import Any

import jax

MAX_IN_FLIGHT = 2


class RunAhead:
    """The calls of one step that were dispatched and not yet waited for."""

    def __init__(self) -> None:
        """Nothing is in flight."""
        self._tokens: collections.deque[Any] = collections.deque()

    def __len__(self) -> int:
        """How many calls may still be running."""
        return len(self._tokens)

    def add(self, token: jax.Array) -> None:
        """Note a call by one of its outputs; wait for the call before the last two."""
        self._tokens.append(token)
        while len(self._tokens) > MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Wait until every call has run."""
        while self._tokens:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        oldest = self._tokens.popleft()
        if not oldest.is_deleted():  # the user may have deleted or donated it
            jax.block_until_ready(oldest)
