from __future__ import annotations

from tierd.daemon import history
from tierd.daemon.history import History


def test_it_keeps_the_newest_and_numbers_go_on() -> None:
    told = History(lambda: 12.3456)
    for number in range(history.MAX_ENTRIES + 5):
        told.tell("notice", str(number))
    kept = told.since(0)
    assert len(kept) == history.MAX_ENTRIES
    assert kept[0] == {"number": 6, "kind": "notice", "text": "5", "at_s": 12.346}
    assert [entry["text"] for entry in told.since(kept[-2]["number"])] == [kept[-1]["text"]]
    assert told.since(10**9) == []
