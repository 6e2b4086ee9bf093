from __future__ import annotations

import threading

import pytest

from tierd.tiers.links import LinkMeter


def test_a_link_counts_what_it_carries() -> None:
    meter = LinkMeter()
    meter.enqueue()
    meter.enqueue()
    meter.record(1000, 0.5, failed=False)
    stats = meter.statistics()
    assert (stats.total_bytes, stats.busy_s, stats.count, stats.errors, stats.queued) == (1000, 0.5, 1, 0, 1)
    assert stats.bytes_per_s == 2000
    meter.record(1000, 0.5, failed=True)
    assert meter.statistics().total_bytes == 1000
    assert meter.statistics().errors == 1


def test_the_rate_follows_the_link() -> None:
    meter = LinkMeter()
    for _ in range(100):
        meter.record(1000, 1.0, failed=False)
    for _ in range(100):
        meter.record(500, 1.0, failed=False)
    assert meter.statistics().bytes_per_s == pytest.approx(500, rel=0.01)


def test_threads_lose_no_count() -> None:
    meter = LinkMeter()

    def carry() -> None:
        for _ in range(2000):
            meter.enqueue()
            meter.record(3, 0.001, failed=False)

    threads = [threading.Thread(target=carry) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = meter.statistics()
    assert (stats.count, stats.total_bytes, stats.queued) == (8000, 24000, 0)
