"""Waking every task that waits for a state to change."""

from __future__ import annotations

import asyncio


class Broadcast:
    """Wakes all who wait now; who comes later waits for the next change.

    Waiters look at the state, find it not ready, wait, and look again: nothing is carried, so nothing can pile up.

    Threading: for one event loop.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change, at most `timeout_s`. False when none came."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
