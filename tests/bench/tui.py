"""What `tierd top` costs while it looks at a large daemon: CPU, memory, and the time from a key to its paint.

    python tests/bench/tui.py [FRAMES]

250,000 pages in three tiers, 64 requests, 10,000 prefixes, 4 frames a second, a screen of 200 by 50. Every frame is
decoded from the bytes of the wire: 500 changed pages each, all prefixes anew once a second. Figures are of this process
alone, with Textual drawing to no terminal.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from textual import events

from tests.tui import scenes
from tierd.daemon.protocol import Event, FrameDecoder, encode
from tierd.tui.app import TopApp
from tierd.tui.feed import Show
from tierd.tui.snapshot import Assembler, Phase, Standing
from tierd.tui.view import View
from tierd.tui.wire import IDLE, PINNED, DaemonReport, PageMap, TopAnswer, convert

SLOTS = {"device": 50_000, "host": 50_000, "nvme": 150_000}
CHANGED = 500  # pages a frame
PREFIXES, REQUESTS, HZ = 10_000, 64, 4
SIZE = (200, 50)


def frames() -> Iterator[bytes]:
    """Wire bytes of one frame after the other."""
    chance = random.Random(1)
    shares = {0: 2, PINNED: 3, IDLE: 5}
    table = scenes.prefixes(PREFIXES)
    base = scenes.busy(0)
    for at in range(1_000_000):
        maps = []
        for tier, slots in SLOTS.items():
            if at == 0:
                maps.append(scenes.page_map(tier, slots, shares, 3, owners=REQUESTS))
                continue
            count = CHANGED * slots // sum(SLOTS.values())
            changed = sorted(chance.sample(range(slots), count))
            maps.append(
                PageMap(
                    tier, version=at + 1, base=at, slots=slots, changed=struct.pack(f"<{count}I", *changed),
                    cells=bytes(chance.choices(list(shares), list(shares.values()), k=count)),
                    used=struct.pack(f"<{count}I", *[5000 + at // HZ] * count),
                    owners=bytes(2 * count), prefixes=bytes(2 * count),
                )  # fmt: skip
            )
        prefix_table = msgspec.structs.replace(table, version=at // HZ, rows=table.rows if at % HZ == 0 else None)
        answer = TopAnswer(
            model="smollm2-135m", clock_s=5000.0 + at / HZ, maps=tuple(maps), sequences=scenes.sequences(REQUESTS),
            prefixes=prefix_table, events=scenes.events(), plan=scenes.PLAN, weights=scenes.WEIGHTS,
        )  # fmt: skip
        data = {"status": scenes.busy(at % 24).daemon if at else base.daemon, "top": answer}
        yield encode(Event(1, "result", msgspec.to_builtins(data, builtin_types=(bytes,))))


class Load:
    """Decodes a frame every quarter of a second. What preparing it costs is measured apart and taken off."""

    def __init__(self) -> None:
        self._frames = frames()
        self.preparing_s = 0.0
        self.shown = 0

    async def run(self, show: Show) -> None:
        assembler, decoder = Assembler(), FrameDecoder()
        assembler.stand(Standing(Phase.LIVE))
        while True:
            before_s = time.process_time()
            raw = next(self._frames)
            self.preparing_s += time.process_time() - before_s
            for message in decoder.feed(raw):
                daemon = convert(message["data"]["status"], DaemonReport)
                # By its own clock: what happens every few seconds shall not come with each frame of a busy machine.
                show(assembler.take(self.shown / HZ, None, daemon, convert(message["data"]["top"], TopAnswer)))
            self.shown += 1
            await asyncio.sleep(1 / HZ)

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        return {}

    async def generate(self, submit: object) -> Any:
        raise NotImplementedError
        yield

    async def aclose(self) -> None:
        pass


class Watched(TopApp):
    """Tells when it has painted."""

    painted: asyncio.Event | None = None

    def _display(self, screen: Any, renderable: Any) -> None:
        super()._display(screen, renderable)
        if self.painted is not None:
            self.painted.set()


def rss_mib() -> float:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


async def key_to_paint_ms(app: Watched, key: str) -> float:
    app.painted = asyncio.Event()
    began_s = time.perf_counter()
    app.post_message(events.Key(key, None))
    await app.painted.wait()
    return 1000 * (time.perf_counter() - began_s)


async def cpu_percent(load: Load, frames: int) -> float:
    """CPU time a frame, as a share of a core at 4 frames a second. Wall time would be that of the neighbours, too."""
    first, cpu_s, preparing_s = load.shown, time.process_time(), load.preparing_s
    while load.shown < first + frames:  # noqa: ASYNC110 - nothing tells of frames but their count
        await asyncio.sleep(1 / HZ)
    spent_s = time.process_time() - cpu_s - (load.preparing_s - preparing_s)
    return round(100 * HZ * spent_s / (load.shown - first), 1)


async def measure(count: int) -> dict[str, float]:
    load = Load()
    before_mib = rss_mib()
    app = Watched(load, View(), clock=time.monotonic, time_of_day=time.gmtime)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(2.0)
        figures = {"cpu_percent_of_a_core": await cpu_percent(load, count), "rss_mib": round(rss_mib(), 1)}
        figures["rss_mib_of_the_bench_itself_before"] = round(before_mib, 1)
        delays = []
        for number in range(40):
            delays.append(await key_to_paint_ms(app, "down" if number % 2 else "right"))
            await asyncio.sleep(0.03)
        figures["key_to_paint_ms_median"] = round(statistics.median(delays), 1)
        figures["key_to_paint_ms_max"] = round(max(delays), 1)
        await pilot.press("z", "o", "o")  # by age: pages are sorted anew every few seconds
        await pilot.pause(1.0)
        figures["cpu_percent_map_alone_by_age"] = await cpu_percent(load, count)
        figures["rss_mib_by_age"] = round(rss_mib(), 1)
    return figures


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 40)), indent=2))
