"""Snapshots from answers: rates, marks, what counters tell, maps that contradict themselves."""

from __future__ import annotations

import msgspec
import pytest

from tests.tui.scenes import busy, engine, tier, unloaded
from tierd.daemon.errors import ProtocolError
from tierd.tui.snapshot import Assembler
from tierd.tui.wire import DaemonReport, EngineReport, PageMap, PagerReport, PrefixTable, TierReport, TopAnswer


def reported(**fields: object) -> DaemonReport:
    found = EngineReport(model="m", state="ready", pid=1, **fields)  # type: ignore[arg-type]
    return DaemonReport(model="m", engines=(found,))


def test_a_rate_is_the_growth_between_two_frames() -> None:
    assembler = Assembler()
    first, second = busy(0), busy(1)
    assert assembler.take(0.0, None, first.daemon, first.top).links[0].now_bytes_per_s is None
    links = assembler.take(0.5, None, second.daemon, second.top).links
    for link, before, after in zip(links, first.daemon.engines[0].links.values(),
                                   second.daemon.engines[0].links.values(), strict=True):  # fmt: skip
        assert link.now_bytes_per_s == (after.total_bytes - before.total_bytes) / 0.5
        assert link.history == (link.now_bytes_per_s,)


def test_another_engine_starts_from_nothing() -> None:
    assembler = Assembler()
    for at in range(3):
        assembler.take(float(at), None, busy(at).daemon, busy(at).top)
    other = msgspec.structs.replace(busy(3).daemon.engines[0], pid=9)
    snapshot = assembler.take(3.0, None, msgspec.structs.replace(busy(3).daemon, engines=(other,)), busy(3).top)
    assert all(link.now_bytes_per_s is None and not link.history for link in snapshot.links)


def test_the_high_water_mark_stays_when_the_water_falls() -> None:
    assembler = Assembler()
    for used in (10, 300, 5):
        snapshot = assembler.take(0.0, None, reported(tiers={"device": tier(512, used, 0)}), None)
    assert dict(snapshot.high_water) == {"device": 300}


def test_a_reported_high_water_mark_counts() -> None:
    told = TierReport(total_pages=512, free_pages=512, high_water_pages=480)
    snapshot = Assembler().take(0.0, None, reported(tiers={"device": told}), None)
    assert dict(snapshot.high_water) == {"device": 480}


def test_counters_tell_what_happened() -> None:
    assembler = Assembler()
    tiers = {"device": tier(512, 0, 9, evictions=0)}
    assembler.take(0.0, 1.0, reported(tiers=tiers, pager=PagerReport()), None)
    tiers = {"device": tier(512, 0, 9, evictions=12)}
    news = reported(tiers=tiers, pager=PagerReport(loaded_pages=1, misses={"checksum {}": 2}), failures=3,
                    notices=("the disk is {full}",))  # fmt: skip
    events = assembler.take(1.0, 2.0, news, None).events
    assert [(event.kind, event.text) for event in events] == [
        ("notice", "the disk is {full}"), ("evict", "12 pages left device"), ("restore", "1 page came from disk"),
        ("damage", "2 pages found, but not there: checksum ()"), ("failure", "requests failed: 3"),
    ]  # fmt: skip
    assert {event.at_s for event in events} == {2.0}


def test_what_goes_on_happening_is_one_line() -> None:
    assembler = Assembler()
    for written in (0, 3, 10):
        snapshot = assembler.take(float(written), None, reported(pager=PagerReport(written_pages=written)), None)
    assert [event.text for event in snapshot.events] == ["10 pages made durable"]


def test_reported_events_are_shown_once() -> None:
    assembler = Assembler()
    for at in range(3):
        snapshot = assembler.take(float(at), None, busy(at).daemon, busy(at).top)
    assert [event.number for event in snapshot.events] == [0, 1, 2, 3]
    assert snapshot.events_reported


def test_without_a_model_there_is_no_engine() -> None:
    snapshot = Assembler().take(0.0, None, unloaded(0).daemon, None)
    assert snapshot.engine is None and snapshot.links == () and snapshot.maps == ()


def test_the_engine_that_was_asked_for_is_shown() -> None:
    one, two = (msgspec.structs.replace(engine(0, {}, busy=0, running=0), model=name) for name in "ab")
    daemon = DaemonReport(model="a", engines=(one, two))
    assert Assembler(model="b").take(0.0, None, daemon, None).engine == two


@pytest.mark.parametrize(
    "part",
    [
        PageMap("device", slots=3, cells=b"\0\0"), PageMap("device", slots=-1), PageMap("device", slots=1 << 25),
        PageMap("device", slots=1, cells=b"\0", used=b"\0\0\0"), PageMap("device", slots=1, cells=b"\0", owners=b"\0"),
        PageMap("device", base=4, slots=2), PageMap("device", base=1, slots=3),
        PageMap("device", base=1, slots=2, changed=b"\2\0\0\0", cells=b"\0"),
        PageMap("device", base=1, slots=2, changed=b"\1\0\0\0", cells=b"\0\0"),
    ],
)  # fmt: skip
def test_a_map_that_contradicts_itself_is_refused(part: PageMap) -> None:
    assembler = Assembler()
    assembler.take(0.0, None, reported(), TopAnswer(maps=(PageMap("device", version=1, slots=2, cells=b"\0\0"),)))
    with pytest.raises(ProtocolError):
        assembler.take(1.0, None, reported(), TopAnswer(maps=(part,)))


def test_an_empty_delta_keeps_the_map() -> None:
    assembler = Assembler()
    assembler.take(0.0, None, reported(), TopAnswer(maps=(PageMap("device", version=1, slots=2, cells=b"\1\2"),)))
    snapshot = assembler.take(1.0, None, reported(), TopAnswer(maps=(PageMap("device", version=2, base=1, slots=2),)))
    assert (snapshot.maps[0].cells, snapshot.maps[0].version) == (b"\1\2", 2)


def test_prefixes_without_rows_are_those_of_before() -> None:
    assembler = Assembler()
    first = assembler.take(0.0, None, busy(0).daemon, busy(0).top)
    second = assembler.take(1.0, None, busy(1).daemon, TopAnswer(prefixes=PrefixTable(version=1)))
    assert second.prefixes is first.prefixes
    with pytest.raises(ProtocolError, match="without its rows"):
        assembler.take(2.0, None, busy(2).daemon, TopAnswer(prefixes=PrefixTable(version=2)))
