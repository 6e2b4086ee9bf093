from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live, record_bytes
from tierd.daemon.engine.status import Meter


def test_rates_are_averages_of_a_window() -> None:
    meter = Meter(1.0)
    assert meter.update(10.0, 0, 5) == (0, 0)
    assert meter.update(10.5, 50, 5) == (0, 0)
    assert meter.update(11.0, 100, 7) == (100, 2)
    assert meter.update(11.9, 500, 7) == (100, 2)
    assert meter.update(13.0, 100, 7) == (0, 0)


def test_a_snapshot_of_a_working_engine(tmp_path: Path) -> None:
    tiny = prepare(reference("llama"), tmp_path / "model")
    with Live(tiny, tmp_path / "cache", device=16, host=8, nvme=32) as live:
        live.run([{"tokens": list(range(20, 60)), "max_tokens": 8}])
        live.engine.loop.call(lambda: live.engine.board.publish(now=True)).result(5)
        status = live.engine.board.latest
        assert (status.state, status.model, status.context) == ("ready", "tiny", 128)
        assert (status.requests, status.tokens_in, status.tokens_out, status.running) == (1, 40, 8, 0)
        device = status.tiers["device"]
        parts = sum(device[f"{part}_pages"] for part in ("free", "used", "cached", "in_flight"))
        assert parts == device["total_pages"] == 16
        assert device["total_bytes"] == 16 * device["page_bytes"]
        assert 1 <= device["needed_pages"] <= 16
        assert device["needed_bytes"] == device["needed_pages"] * device["page_bytes"]
        assert status.speculation["mode"] == "auto" and status.speculation["drafted_tokens"] >= 0
        assert set(status.tiers) == {"device", "host", "nvme"} and status.links
        live.flush()
        live.engine.loop.call(lambda: live.engine.board.publish(now=True)).result(5)
        status = live.engine.board.latest
        assert status.store["pages_written"] == 3 and status.writes["written_tokens"] == 47
        assert status.writes["today_bytes"] == status.writes["written_bytes"] == 3 * device["page_bytes"]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(status))["pager"]["lookups"] == 1
        with pytest.raises(AttributeError):
            status.state = "x"  # type: ignore[misc]


def test_the_days_writes_are_bounded_over_restarts(tmp_path: Path) -> None:
    tiny = prepare(reference("llama"), tmp_path / "model")
    page_bytes = record_bytes(tiny, "fp32")
    for start in (20, 70):
        with Live(tiny, tmp_path / "cache", device=16, nvme=32, nvme_daily_writes_bytes=4 * page_bytes) as live:
            live.run([{"tokens": list(range(start, start + 40)), "max_tokens": 8}])
            live.engine.loop.flush(5.0).result(10)
            live.engine.loop.call(lambda: live.engine.board.publish(now=True)).result(5)
            writes = live.engine.board.latest.writes
            assert writes["daily_bytes"] == 4 * page_bytes
            assert writes["today_bytes"] == 3 * page_bytes, "the second one may write no page that nobody used twice"
