"""Recorded feeds of a daemon in every state that the screen must be able to show. The same bytes on every machine."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from tierd.tui.record import Frame, Recorder
from tierd.tui.wire import (
    CELL_DURABLE,
    CELL_IN_HOST,
    CELL_KEPT,
    CELL_MOVING,
    CELL_PARTIAL,
    DAMAGED,
    FILLING,
    FREE,
    IDLE,
    PINNED,
    PRIVATE,
    DaemonReport,
    EngineReport,
    EventRow,
    LinkReport,
    PageMap,
    PagerReport,
    PlanRow,
    PrefixRow,
    PrefixTable,
    QueueReport,
    SequenceRow,
    TierReport,
    TopAnswer,
    WeightRow,
)

MIB = 1 << 20
START_WALL_S = 1_790_000_000.0
CLOCK_S = 5000.0
OPS = ("cache", "cancel_request", "hello", "page", "pages", "prefix", "resize", "status", "top", "unload")
FRAMES = 24
TEXTS = (
    "You are a careful assistant. Answer in English.", "def main() -> None:", "Summarise the following report:",
    "Translate to French: the weather is fine", "SELECT name FROM users WHERE", "Chapter 1. Call me Ishmael.",
    "Explain why the sky is blue", "# README", "Dear Ms Okabe, thank you for", "The quick brown fox",
)  # fmt: skip


def tier(total: int, used: int, cached: int, moving: int = 0, page_bytes: int = MIB, **more: int | None) -> TierReport:
    return TierReport(
        total_pages=total, free_pages=total - used - cached - moving, used_pages=used, cached_pages=cached,
        in_flight_pages=moving, page_bytes=page_bytes, **more,  # type: ignore[arg-type]
    )


def page_map(name: str, slots: int, states: dict[int, float], seed: int, *, owners: int = 0) -> PageMap:
    """A map whose pages come in runs, as sequences make them. `states`: cell -> share."""
    chance = random.Random(seed)
    cells, used, owned, prefixes = bytearray(), [], [], []
    while len(cells) < slots:
        cell = chance.choices(list(states), list(states.values()))[0]
        run = min(chance.randint(1, 24), slots - len(cells))
        live = cell & 7 in (PRIVATE, PINNED)
        recent = 0 if cell & 7 == FREE else int(CLOCK_S) - (chance.randint(0, 9) if live else chance.randint(5, 900))
        cells += bytes([cell]) * run
        used += [recent] * run
        owned += [chance.randint(1, owners) if live and owners else 0] * run
        prefixes += [chance.randint(1, 9) if recent else 0] * run
    return PageMap(
        name, version=1, slots=slots, cells=bytes(cells), used=struct.pack(f"<{slots}I", *used),
        owners=struct.pack(f"<{slots}H", *owned), prefixes=struct.pack(f"<{slots}H", *prefixes),
    )  # fmt: skip


def prefixes(count: int, seed: int = 5) -> PrefixTable:
    chance = random.Random(seed)
    rows = []
    for index in range(count):
        parent = -1 if index < 3 else chance.choice([-1, *range(max(0, index - 12), index)])
        size = chance.randint(1, 400) * 16
        where = chance.choice(((1, 0, 1), (1, 1, 1), (0, 1, 1), (0, 0, 1)))
        rows.append(
            PrefixRow(
                index.to_bytes(16, "big"), parent, size, chance.randint(0, 90), *(size * 36864 * on for on in where),
                CLOCK_S - chance.randint(1, 4000), index == 0, "" if index % 4 else "mail", TEXTS[index % len(TEXTS)],
            )  # fmt: skip
        )
    return PrefixTable(version=1, rows=msgspec.msgpack.encode(tuple(rows)))


def events(*more: tuple[str, str, str, int]) -> tuple[EventRow, ...]:
    told = [
        ("notice", "the page store opened with 612 pages", "", -1),
        ("promote", "48 pages came from RAM", "", -1),
        ("evict", "12 pages left device", "", -1),
        ("persist", "64 pages were made durable", "", -1),
        *more,
    ]
    return tuple(
        EventRow(number, kind, text, START_WALL_S + 7.0 * number, where, slot)
        for number, (kind, text, where, slot) in enumerate(told)
    )


def sequences(count: int, seed: int = 3) -> tuple[SequenceRow, ...]:
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        phase = ("decode", "decode", "prefill", "fetching", "waiting")[number % 5]
        runs: tuple[tuple[str, int], ...] = (("device", chance.randint(200, 4000)),)
        if phase == "prefill":
            runs = (("host", 900), ("device", 700), ("missing", chance.randint(300, 2500)))
        elif phase == "fetching":
            runs = (("nvme", 6000), ("moving", 1500), ("device", 600))
        elif phase == "waiting":
            runs = (("missing", chance.randint(40, 900)),)
        rows.append(
            SequenceRow(
                41 + number, phase, runs, age_s=1.5 * number + 0.4,
                tokens_per_s=14.2 + number if phase == "decode" else None,
                restore_done=310 if phase == "fetching" else None, restore_total=506 if phase == "fetching" else None,
            )  # fmt: skip
        )
    return tuple(rows)


WEIGHTS = tuple(WeightRow(f"layer {n}", 7 * MIB, "device" if n < 24 else "host", 90 + n, 130) for n in range(30))
PLAN = (
    PlanRow("decode", "tok/s", 16.0, 14.2), PlanRow("prefill", "tok/s", 210.0, 198.0),
    PlanRow("disk read", "bytes/s", 2.4e9, 2.1e9), PlanRow("restore of a page", "ms", 0.8, None),
)  # fmt: skip


def links(at: int, busy: float, *, wait: bool = False) -> dict[str, LinkReport]:
    """Totals that grow in waves; `busy` scales them, 0 is silence."""
    peaks = {"host_to_device": 9e9, "device_to_host": 8e9, "disk_read": 2.4e9, "disk_write": 1.6e9}
    out = {}
    for place, (name, peak) in enumerate(peaks.items()):
        wave = [busy * peak * (0.15 + ((step * (place + 3)) % 11) / 13) for step in range(at + 1)]
        out[name] = LinkReport(
            total_bytes=int(sum(wave) * 0.25), busy_s=at * 0.1, count=at * 9, queued=(place * at) % 5 if busy else 0,
            bytes_per_s=busy * peak * 0.7, peak_bytes_per_s=peak, p99_bytes_per_s=busy * peak * 0.95,
            compute_wait_s=0.01 * (at // 6) if wait and name == "disk_read" else 0.0,
        )  # fmt: skip
    return out


def engine(at: int, tiers: dict[str, TierReport], *, busy: float, running: int, waiting: int = 0, fetching: int = 0,
           state: str = "ready", wait: bool = False, failures: int = 0) -> EngineReport:  # fmt: skip
    return EngineReport(
        model="smollm2-135m", state=state, pid=4242, uptime_s=600.0 + at / 4, rss_bytes=1_340 * MIB, context=8192,
        running=running, waiting=waiting, fetching=fetching, requests=88 + at, step_ms=68.4 if busy else 0.0,
        tokens_in=48_210 + at * 40, tokens_out=9_120 + at * 4, cached_tokens=31_004,
        prefill_tokens_per_s=198.3 * bool(busy), decode_tokens_per_s=56.8 * bool(busy), preemptions=int(waiting > 4),
        failures=failures, tiers=tiers, links=links(at, busy, wait=wait),
        pager=PagerReport(known_pages=1480, leases=running, lookups=312, lookup_tokens=88_000,
                          hit_device_tokens=40_000, hit_host_tokens=9_000, hit_nvme_tokens=12_000, nvme_on=True),
    )  # fmt: skip


def daemon(at: int, *engines: EngineReport, waiting: int = 0) -> DaemonReport:
    running = sum(found.running for found in engines)
    return DaemonReport(
        pid=4240, state="ready" if engines else "idle", model=engines[0].model if engines else None, version="0.1.0",
        uptime_s=7384.0 + at / 4, socket="/run/user/1000/tierd/tierd.sock", http="127.0.0.1:8421", engines=engines,
        queue=QueueReport(running + waiting, running, waiting, 512),
    )  # fmt: skip


def top(maps: tuple[PageMap, ...], rows: int, count: int, told: tuple[EventRow, ...]) -> TopAnswer:
    return TopAnswer(
        model="smollm2-135m", clock_s=CLOCK_S, page_tokens=16, page_format="fp32", maps=maps,
        sequences=sequences(rows), prefixes=prefixes(count), events=told, weights=WEIGHTS, plan=PLAN,
    )  # fmt: skip


def frame(at: int, report: DaemonReport, answer: TopAnswer | None) -> Frame:
    return Frame(1000.0 + at / 4, report, answer, START_WALL_S + at / 4, OPS)


def idle(at: int) -> Frame:
    tiers = {"device": tier(512, 0, 96, evictions=0, high_water_pages=190, evict_at_pages=480),
             "host": tier(1024, 0, 210), "nvme": tier(4096, 0, 612)}  # fmt: skip
    maps = (
        page_map("device", 512, {FREE: 8, IDLE | CELL_DURABLE: 2}, 1),
        page_map("host", 1024, {FREE: 8, IDLE: 2}, 2),
        page_map("nvme", 4096, {FREE: 17, IDLE: 3}, 3),
    )
    return frame(at, daemon(at, engine(at, tiers, busy=0.0, running=0)), top(maps, 0, 12, events()))


def busy(at: int) -> Frame:
    tiers = {"device": tier(512, 210, 190, 12, evictions=340, high_water_pages=490, evict_at_pages=480,
                            weights_bytes=260 * MIB),
             "host": tier(1024, 60, 700, 8, evictions=12), "nvme": tier(4096, 90, 2400, 20)}  # fmt: skip
    device = {FREE: 3, PRIVATE: 1, PINNED | CELL_IN_HOST: 4, IDLE | CELL_DURABLE: 4, FILLING: 0.4,
              IDLE | CELL_KEPT: 0.6, IDLE | CELL_PARTIAL: 0.5}  # fmt: skip
    maps = (
        page_map("device", 512, device, 11, owners=9),
        page_map("host", 1024, {FREE: 3, PINNED: 1, IDLE: 6, IDLE | CELL_MOVING: 0.3}, 12, owners=9),
        page_map("nvme", 4096, {FREE: 4, IDLE: 6}, 13),
    )
    report = daemon(at, engine(at, tiers, busy=0.6, running=9, waiting=2, fetching=1, wait=True), waiting=2)
    return frame(at, report, top(maps, 11, 60, events()))


def full(at: int) -> Frame:
    tiers = {"device": tier(512, 498, 10, 4, evictions=9120, high_water_pages=512, evict_at_pages=480),
             "host": tier(1024, 900, 124, evictions=4410), "nvme": tier(4096, 200, 3896, evictions=77)}  # fmt: skip
    maps = (
        page_map("device", 512, {PRIVATE: 2, PINNED: 8, FILLING: 0.3, IDLE: 0.3}, 21, owners=16),
        page_map("host", 1024, {PINNED: 8, IDLE: 1}, 22, owners=16),
        page_map("nvme", 4096, {IDLE: 1}, 23),
    )
    report = daemon(at, engine(at, tiers, busy=1.0, running=16, waiting=31, fetching=3, wait=True), waiting=31)
    told = events(("preempt", "2 requests made room for others", "", -1), ("disk", "writes wait for space", "", -1))
    return frame(at, report, top(maps, 47, 200, told))


def restoring(at: int) -> Frame:
    arrived = at / FRAMES
    tiers = {"device": tier(512, 40, int(200 * arrived), 64), "host": tier(1024, 0, int(300 * arrived), 90),
             "nvme": tier(4096, 506, 1900)}  # fmt: skip
    maps = (
        page_map("device", 512, {FREE: 6, FILLING: 2, PINNED: 2 * arrived}, 31, owners=2),
        page_map("host", 1024, {FREE: 7, FILLING: 1.5, IDLE: 2 * arrived}, 32),
        page_map("nvme", 4096, {FREE: 4, IDLE: 3, IDLE | CELL_MOVING: 1}, 33),
    )
    report = daemon(at, engine(at, tiers, busy=0.8, running=2, fetching=2))
    told = events(("restore", f"{at * 13} pages came from disk", "", -1))
    answer = top(maps, 0, 24, told)
    done = int(506 * arrived)
    rows = (
        SequenceRow(7, "fetching", (("device", done * 16), ("moving", 480), ("nvme", max((506 - done) * 16 - 480, 0))),
                    age_s=at / 4, restore_done=done, restore_total=506),
        SequenceRow(8, "fetching", (("host", 1200), ("moving", 320), ("missing", 900)), age_s=at / 4,
                    restore_done=60, restore_total=95),
    )  # fmt: skip
    return frame(at, report, msgspec.structs.replace(answer, sequences=rows))


def corrupted(at: int) -> Frame:
    seen = busy(at)
    assert seen.top is not None
    maps = []
    for part in seen.top.maps:
        cells = bytearray(part.cells)
        for slot in (7, 8, len(cells) // 2):
            cells[slot] = DAMAGED | (cells[slot] & CELL_DURABLE)
        maps.append(msgspec.structs.replace(part, cells=bytes(cells)))
    told = events(
        ("damage", "a page on disk failed its check; its tokens are computed again", "nvme", 7),
        ("damage", "a page on disk failed its check; its tokens are computed again", "nvme", 2048),
    )
    answer = msgspec.structs.replace(seen.top, maps=tuple(maps), events=told)
    return msgspec.structs.replace(seen, top=answer)


def bare(at: int) -> Frame:
    """A daemon that has no `top`: figures and the map of the device alone."""
    seen = busy(at)
    assert seen.top is not None
    device = seen.top.maps[0]
    plain = TopAnswer(model="smollm2-135m", maps=(PageMap("device", slots=device.slots, cells=device.cells),))
    report = msgspec.structs.replace(seen.daemon.engines[0], links={
        name: LinkReport(link.total_bytes, link.busy_s, link.count, 0, link.queued, link.bytes_per_s)
        for name, link in seen.daemon.engines[0].links.items()
    }, notices=("the disk tier is full: old pages make room for new ones",))  # fmt: skip
    old = msgspec.structs.replace(seen.daemon, engines=(report,))
    return msgspec.structs.replace(seen, daemon=old, top=plain, ops=("cache", "hello", "pages", "status", "unload"))


def unloaded(at: int) -> Frame:
    return frame(at, daemon(at), None)


SCENES: dict[str, Callable[[int], Frame]] = {
    "idle": idle, "busy": busy, "full": full, "restoring": restoring, "corrupted": corrupted, "bare": bare,
    "unloaded": unloaded,
}  # fmt: skip


def record(scene: str, path: Path, frames: int = FRAMES) -> Path:
    """A recording of a scene."""
    recorder = Recorder(path)
    for at in range(frames):
        recorder.write(SCENES[scene](at))
    recorder.close()
    return path
