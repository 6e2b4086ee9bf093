"""Waking all who wait."""

from __future__ import annotations

import asyncio

from tierd.daemon.broadcast import Broadcast


async def test_everyone_who_waits_is_woken():
    broadcast = Broadcast()
    waiters = [asyncio.create_task(broadcast.wait(5)) for _ in range(3)]
    await asyncio.sleep(0)
    broadcast.notify()
    assert await asyncio.gather(*waiters) == [True] * 3


async def test_who_comes_later_waits_for_the_next_change():
    broadcast = Broadcast()
    broadcast.notify()
    assert await broadcast.wait(0.01) is False
