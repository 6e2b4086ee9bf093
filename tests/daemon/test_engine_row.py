"""An engine as it is told."""

from __future__ import annotations

import os

from front_harness import Front

from tierd.daemon import engine_row


async def test_an_engine_that_is_up(front: Front) -> None:
    await front.service.load("alpha")
    engine = front.engine()
    await engine_row.refresh(engine)
    told = engine_row.row(engine, 1.23456, None)
    assert told["model"] == "alpha" and told["state"] == "ready" and told["pid"] == engine.pid != os.getpid()
    assert told["rss_bytes"] > 1 << 20 and told["idle_s"] == 1.235 and told["expires_in_s"] is None
    assert told["running"] == told["waiting"] == 0
    assert engine_row.row(engine, 0.0, 9.8765)["expires_in_s"] == 9.877


async def test_one_that_is_gone_has_no_memory_and_is_not_asked(front: Front) -> None:
    await front.service.load("alpha")
    engine = front.engine()
    await front.service.unload("alpha")
    before = engine.status
    await engine_row.refresh(engine)
    assert engine.status is before and engine_row.row(engine, 0.0, 0.0)["rss_bytes"] == 0
