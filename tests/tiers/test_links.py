from __future__ import annotations

import threading

import pytest

from tierd.tiers.links import Link, LinkGroup, LinkMeter, held_up


def carry(meter: LinkMeter, start_s: float, num_bytes: int, seconds: float, *, failed: bool = False) -> None:
    meter.enqueue()
    meter.begin(start_s, 0.25)
    meter.end(start_s + seconds, num_bytes, seconds, failed=failed)


def test_a_link_counts_what_it_carries() -> None:
    meter = LinkMeter()
    meter.enqueue()
    carry(meter, 10.0, 1000, 0.5)
    stats = meter.statistics()
    assert (stats.total_bytes, stats.busy_s, stats.count, stats.errors, stats.queued) == (1000, 0.5, 1, 0, 1)
    assert (stats.active_s, stats.waited_s, stats.bytes_per_s) == (0.5, 0.25, 2000)
    carry(meter, 20.0, 1000, 0.5, failed=True)
    meter.abandon(cancelled=True)
    stats = meter.statistics()
    assert (stats.total_bytes, stats.count, stats.errors, stats.cancelled, stats.queued) == (1000, 2, 1, 1, 0)
    meter.enqueue()
    meter.abandon(cancelled=False)
    assert meter.statistics().errors == 2


def test_the_rate_follows_the_link() -> None:
    meter = LinkMeter()
    for number in range(100):
        carry(meter, float(number), 1000, 0.1)
    assert meter.statistics().bytes_per_s == pytest.approx(10_000)
    for number in range(100, 200):
        carry(meter, float(number), 500, 0.1)
    assert meter.statistics().bytes_per_s == pytest.approx(5000, rel=0.01)


def test_transfers_at_once_add_up() -> None:
    """The rate is that of the link, not of one transfer; idle time does not count."""
    meter = LinkMeter()
    for turn in range(20):
        for _ in range(4):
            meter.enqueue()
            meter.begin(turn * 10.0, 0.0)
        for _ in range(4):
            meter.end(turn * 10.0 + 0.5, 1000, 0.5, failed=False)
    stats = meter.statistics()
    assert stats.bytes_per_s == pytest.approx(8000, rel=0.2)
    assert stats.active_s == pytest.approx(10.0)
    assert stats.busy_s == pytest.approx(40.0)


def test_the_peak_is_the_best_of_many_transfers_and_stays() -> None:
    meter = LinkMeter()
    carry(meter, 0.0, 1000, 0.001)
    assert meter.statistics().peak_bytes_per_s == 0.0  # one short transfer says nothing
    for number in range(1, 200):
        carry(meter, float(number), 1000, 0.001)
    assert meter.statistics().peak_bytes_per_s == pytest.approx(1e6, rel=0.06)
    for number in range(200, 400):
        carry(meter, float(number), 100, 0.005)
    stats = meter.statistics()
    assert stats.peak_bytes_per_s == pytest.approx(1e6, rel=0.06)
    assert stats.bytes_per_s < 0.2 * stats.peak_bytes_per_s


def test_an_odd_piece_is_the_peak_and_not_what_is_usual() -> None:
    meter = LinkMeter()
    for number in range(200):
        carry(meter, float(number), 9000 if number == 50 else 1000, 0.05)
    stats = meter.statistics()
    assert stats.peak_bytes_per_s == pytest.approx(180_000) and stats.p99_bytes_per_s == pytest.approx(20_000)


def test_a_snapshot_stands_still_and_sorting_is_its_affair() -> None:
    meter = LinkMeter()
    for number in range(50):
        carry(meter, float(number), 1000 + number, 0.05)
    before, still = meter.statistics(), meter.snapshot()
    for number in range(50, 90):
        carry(meter, float(number), 9000, 0.05)
    assert still.statistics() == before != meter.statistics()


def test_time_is_counted_for_links_that_move_something_urgent() -> None:
    now, busy, quiet = [0.0], LinkMeter(), LinkMeter()
    busy.enqueue(urgent=True)
    quiet.enqueue()
    with pytest.raises(ValueError), held_up([busy, quiet], threading.Lock(), lambda: now[0]):
        now[0] = 2.5
        raise ValueError
    busy.settle(urgent=True)
    with held_up([busy, quiet], threading.Lock(), lambda: now[0]):
        now[0] = 9.0
    assert [meter.statistics().compute_wait_s for meter in (busy, quiet)] == [2.5, 0.0]


def test_every_link_has_a_group() -> None:
    assert {link.group for link in Link} == set(LinkGroup)
    assert Link.DEVICE_TO_DEVICE.group is Link.HOST_TO_DEVICE.group is LinkGroup.COPIES
    assert Link.DISK_READ.group is not Link.DISK_WRITE.group
