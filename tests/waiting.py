"""Waiting for what nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Return when it is true: a state of other tasks or threads of this process. Raises TimeoutError."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (no event stands for it)
            await asyncio.sleep(0.002)
