"""The links between tiers as sparklines: what they carry now, beside what they can carry."""

from __future__ import annotations

from tierd.tui.format import amount, bandwidth, percent
from tierd.tui.snapshot import WAIT_SHARE, LinkView, Snapshot
from tierd.tui.view import Line, View, most, spread
from tierd.tui.widgets.panel import Panel

NAMES = {
    "device_to_host": "device → RAM",
    "host_to_device": "RAM → device",
    "device_to_device": "in device",
    "disk_read": "disk read",
    "disk_write": "disk write",
}


def paint(snapshot: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """Two lines a link when there is room: figures, then the sparkline. Else one."""
    if snapshot.engine is None:
        return [[("no engine", "dim")]]
    if not snapshot.links:
        return [[("links: not reported", "dim")]]
    order = list(NAMES)
    links = sorted(snapshot.links, key=lambda link: order.index(link.name) if link.name in order else len(order))
    if height >= 3 * len(links) - 1:
        blocks = [[_figures(link, width), _spark(link, view, width), []] for link in links]
        return [line for block in blocks for line in block][:-1]
    if height >= 2 * len(links):
        return [line for link in links for line in (_figures(link, width), _spark(link, view, width))]
    return [_one_line(link, view, width) for link in links]


def _name(link: LinkView) -> str:
    return NAMES.get(link.name, link.name)


def _role(link: LinkView) -> str:
    return "nvme" if link.name.startswith("disk") else "host" if "host" in link.name else "device"


def _figures(link: LinkView, width: int) -> Line:
    report = link.report
    right: list[Line] = [[(bandwidth(link.now_bytes_per_s), "strong")]]
    if report.peak_bytes_per_s and link.now_bytes_per_s is not None:
        right.append([(f"{percent(link.now_bytes_per_s, report.peak_bytes_per_s)} of peak", "text")])
    if link.wait_share is not None and link.wait_share >= WAIT_SHARE:
        right.append([(f"compute waits {percent(link.wait_share, 1.0)}", "bad")])
    if report.queued:
        right.append([("queue ", "dim"), (amount(report.queued), "text")])
    if report.errors:
        right.append([(f"{amount(report.errors)} errors", "bad")])
    if report.bytes_per_s:
        right.append([("mean ", "dim"), (bandwidth(report.bytes_per_s), "text")])
    if report.p99_bytes_per_s:
        right.append([("p99 ", "dim"), (bandwidth(report.p99_bytes_per_s), "text")])
    left: Line = [(_name(link), _role(link))]
    return spread(left, most(right, width - len(_name(link)) - 2), width)


def _one_line(link: LinkView, view: View, width: int) -> Line:
    label: Line = [(f"{_name(link):<13}", _role(link))]
    right: Line = [(f" {bandwidth(link.now_bytes_per_s):>11}", "strong")]
    room = width - 13 - 12
    return [*label, *(_spark(link, view, room) if room >= 8 else []), *right]


def _spark(link: LinkView, view: View, width: int) -> Line:
    """The newest sample at the right; full height is the measured peak, or the highest seen. `▲`: compute waited."""
    bars = view.glyphs.bars
    top = max(link.report.peak_bytes_per_s or 0.0, *link.history, 0.0)
    samples = link.history[-width:]
    waits = link.waits[-len(samples) :] if samples else ()
    waits = (False,) * (len(samples) - len(waits)) + waits
    out: Line = [(view.glyphs.free * (width - len(samples)), "faint")]
    for sample, waited in zip(samples, waits, strict=True):
        if waited:
            out.append((view.glyphs.wait, "bad"))
        elif sample <= 0 or top <= 0:
            out.append((view.glyphs.free, "faint"))
        else:
            level = min(int(sample / top * len(bars)), len(bars) - 1)
            out.append((bars[level], _role(link)))
    return _merged(out)


def _merged(line: Line) -> Line:
    out: Line = []
    for text, role in line:
        if out and out[-1][1] == role:
            out[-1] = (out[-1][0] + text, role)
        else:
            out.append((text, role))
    return out


class Links(Panel):
    """The links."""

    NAME = "links"
    HELP = (
        "Bytes per second between the tiers: now (over the last frame), lately while it was active (mean), what few "
        "pieces beat (p99), and the share of the best rate that the daemon measured (peak). The newest sample stands "
        "at the right; a wedge marks a frame in which there was nothing to compute until this link had brought more."
    )

    def paint(self, width: int, height: int) -> list[Line]:
        """The links."""
        return paint(self.snapshot, self.view, width, height)
