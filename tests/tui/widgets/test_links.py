"""Links: figures that are reported, sparklines against the peak, marks where compute waited."""

from __future__ import annotations

from tierd.tui.snapshot import LinkView, Snapshot
from tierd.tui.view import View
from tierd.tui.widgets.links import paint
from tierd.tui.wire import EngineReport, LinkReport

ENGINE = EngineReport(model="m", state="ready")


def lines(*links: LinkView, width: int = 60, height: int = 9) -> list[str]:
    painted = paint(Snapshot(engine=ENGINE, links=links), View(), width, height)
    return ["".join(text for text, _ in line) for line in painted]


def test_full_height_is_the_measured_peak() -> None:
    report = LinkReport(peak_bytes_per_s=800.0)
    link = LinkView("disk_read", report, 400.0, history=(0.0, 100.0, 400.0, 800.0))
    text = lines(link, width=30)
    assert text[1].endswith("·▂▅█")
    assert "50% of peak" in lines(link)[0]


def test_without_a_peak_no_share_is_shown() -> None:
    text = lines(LinkView("disk_read", LinkReport(), 400.0, history=(400.0,)))
    assert "peak" not in text[0] and "400 B/s" in text[0]
    assert text[1].endswith("█")


def test_a_frame_in_which_compute_waited_is_marked() -> None:
    link = LinkView("disk_read", LinkReport(), 5.0, history=(5.0, 5.0, 5.0), waits=(True, False))
    assert lines(link)[1].endswith("█▲█")


def test_before_a_second_frame_there_is_no_rate() -> None:
    assert lines(LinkView("disk_read", LinkReport(), None))[0].split()[-1] == "–"


def test_errors_and_queues_are_told() -> None:
    text = lines(LinkView("disk_write", LinkReport(errors=3, queued=2), 0.0))[0]
    assert "3 errors" in text and "queue 2" in text


def test_links_have_one_line_when_there_is_no_room_for_more() -> None:
    links = [LinkView(name, LinkReport(), 0.0) for name in ("disk_read", "disk_write", "host_to_device")]
    text = lines(*links, height=4)
    assert [line.split()[0] for line in text] == ["RAM", "disk", "disk"]


def test_no_engine_and_no_links_are_not_the_same() -> None:
    assert paint(Snapshot(), View(), 30, 5) == [[("no engine", "dim")]]
    assert lines() == ["links: not reported"]
