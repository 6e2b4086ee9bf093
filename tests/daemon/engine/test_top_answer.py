"""What `top` answers, from a whole engine whose threads move pages: of one moment, and true."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.books import PROMPT, expected_cells, expected_on_disk, look
from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tierd.daemon.engine import top
from tierd.daemon.errors import BadRequest, NotFound
from tierd.tiers.arena import SlotState
from tierd.tiers.journal import What
from tierd.tiers.links import Link
from tierd.tiers.page import Tier
from tierd.tiers.pager import Pager
from tierd.tui.snapshot import Assembler, LinkView
from tierd.tui.wire import DaemonReport, EngineReport, PageDetail, TopAnswer, convert, prefix_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("top") / "model")


@pytest.fixture
def live(model: Path, tmp_path: Path) -> Iterator[Live]:
    with Live(model, tmp_path / "cache", device=32, host=16, nvme=64) as live:
        yield live


@pytest.fixture
def tokenizer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_an_answer_has_all_and_the_next_one_what_is_new(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    board, engine = live.engine.top, live.engine
    await asyncio.to_thread(live.run, [{"tokens": PROMPT, "max_tokens": 8}])
    await asyncio.to_thread(live.flush)
    first = await board.answer(engine, tokenizer, {})
    answer = convert(first, TopAnswer)
    assert answer.model == engine.model and answer.page_tokens == 16 and answer.sequences == ()
    assert [(part.tier, part.base, part.slots) for part in answer.maps] == [
        ("device", -1, 32), ("host", -1, 16), ("nvme", -1, 64)
    ]  # fmt: skip
    assert answer.prefixes is not None and answer.prefixes.rows is not None
    [row] = prefix_rows(answer.prefixes.rows)
    assert row.tokens == 47 and engine.intake.text_of(PROMPT[:10]) in row.text
    have = {"maps": {part.tier: part.version for part in answer.maps}, "prefixes": answer.prefixes.version}
    again = convert(await board.answer(engine, tokenizer, have), TopAnswer)
    assert again.prefixes is not None and again.prefixes.rows is None
    assert [part.base for part in again.maps] == [part.version for part in answer.maps]
    assert all(part.cells == b"" for part in again.maps)
    of_another = convert(await board.answer(engine, tokenizer, {"maps": {"device": 5}}), TopAnswer)
    assert of_another.maps[0].base == -1


async def test_a_page_tells_everything(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    await asyncio.to_thread(live.run, [{"tokens": PROMPT, "max_tokens": 8}])
    await asyncio.to_thread(live.flush)
    node = max(live.engine.pager.index.nodes.values(), key=lambda node: node.depth)
    args = {"tier": "device", "slot": node.device}
    found = convert(await live.engine.top.detail(live.engine, tokenizer, args), PageDetail)
    assert found.key == node.key.hex() and found.first_token == 32 and found.tokens == 15 and found.text
    assert found.copies == ("device", "nvme") and found.leases == 0 and found.kept is False
    for slot in (-1, 31, 1 << 40):
        with pytest.raises(NotFound):
            await live.engine.top.detail(live.engine, tokenizer, {"tier": "device", "slot": slot})
    for wrong in ({"tier": "tape", "slot": 1}, {}, {"tier": "device", "slot": "x"}, {"key": "xyz"}):
        with pytest.raises(BadRequest):
            await live.engine.top.detail(live.engine, tokenizer, wrong)


@pytest.mark.parametrize("args", [{"maps": 3}, {"maps": {"device": "x"}}, {"prefixes": "x"}, {"speed": 1}])
async def test_wrong_arguments(live: Live, tokenizer: ThreadPoolExecutor, args: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await live.engine.top.answer(live.engine, tokenizer, args)


async def test_under_load_the_screen_has_what_check_has(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    """A whole engine with threads that move pages: what comes out of a frame are the books of one moment, exactly."""
    engine, pager, board, screen = live.engine, live.engine.pager, live.engine.top, Assembler()
    numbers = [live.submit(tokens=[*PROMPT, 60 + number], max_tokens=60) for number in range(8)]
    report = DaemonReport(model=engine.model, engines=(EngineReport(engine.model, "ready", 7),))
    trees = 0

    def books() -> Books:
        picture = look(board)
        board._due_s = float("inf")  # the answer below is about this very moment
        assert pager.check() == []
        return Books.of(pager, picture.tree.version == picture.version)

    async def agree() -> None:
        nonlocal trees
        held = await asyncio.wrap_future(engine.loop.call(books))
        have = {"maps": {found.tier: found.version for found in screen.snapshot.maps}}
        if screen.snapshot.prefixes is not None:
            have["prefixes"] = screen.snapshot.prefixes_version  # type: ignore[assignment]
        answer = convert(await board.answer(engine, tokenizer, have), TopAnswer)
        shown = screen.take(1.0, 1.0, report, answer)
        assert [list(found.cells) for found in shown.maps[:2]] == held.cells
        assert Counter(shown.maps[2].cells) == held.on_disk
        assert shown.engine is not None and shown.engine.pid == 7
        tiers = shown.engine.tiers
        for found in shown.maps:
            states, gauges = [cell & 7 for cell in found.cells], tiers[found.tier]
            assert gauges.total_pages == found.slots
            assert gauges.free_pages == states.count(SlotState.FREE)
            assert gauges.used_pages == states.count(SlotState.PRIVATE) + states.count(SlotState.PINNED)
            assert gauges.cached_pages == states.count(SlotState.IDLE)
            moving = states.count(SlotState.FILLING) + states.count(SlotState.DRAINING)
            assert gauges.in_flight_pages == moving
        assert shown.engine.pager is not None and shown.engine.pager.known_pages == held.known
        assert sum(row.phase != "waiting" for row in shown.sequences or ()) == held.requests
        if held.tree is not None:
            rows = shown.prefixes or ()
            trees += 1
            record = pager.device.record_bytes
            assert (
                sum(row.tokens for row in rows), sum(row.device_bytes for row in rows) // record,
                sum(row.host_bytes for row in rows) // record, sum(row.nvme_bytes for row in rows) // record,
            ) == held.tree  # fmt: skip

    for _ in range(30):
        await agree()
        await asyncio.sleep(0.01)
    await asyncio.to_thread(live.collect, *numbers)
    await agree()
    assert trees > 5


@dataclass
class Books:
    """What the pager holds at one moment, the slow way. `tree`: tokens, and pages by tier, of all that is known."""

    cells: list[list[int]]
    on_disk: Counter[int]
    known: int
    requests: int
    tree: tuple[int, int, int, int] | None

    @classmethod
    def of(cls, pager: Pager, with_tree: bool) -> Books:
        nodes = pager.index.nodes.values()
        tree = (
            sum(node.num_tokens for node in nodes), sum(node.device >= 0 for node in nodes),
            sum(node.host >= 0 for node in nodes), sum(node.durable for node in nodes),
        )  # fmt: skip
        cells = [expected_cells(pager, tier) for tier in (Tier.DEVICE, Tier.HOST)]
        return cls(cells, expected_on_disk(pager), len(nodes), len(pager.leases), tree if with_tree else None)


async def test_what_happened_is_told_once_and_leads_to_the_page(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    engine, board = live.engine, live.engine.top
    await asyncio.to_thread(live.run, [{"tokens": PROMPT, "max_tokens": 8}])
    await asyncio.to_thread(live.flush)
    first = convert(await board.answer(engine, tokenizer, {}), TopAnswer)
    assert first.events is not None and first.events[0].text == "the engine began with 0 pages on disk"
    persisted = [row for row in first.events if row.kind == "persist"]
    assert persisted and abs((persisted[-1].at_s or 0.0) - time.time()) < 600
    assert sum(int(row.text.split()[0]) for row in persisted) == engine.pager.statistics().written_pages
    page = convert(await board.detail(engine, tokenizer, {"key": persisted[-1].key.hex()}), PageDetail)
    assert page.places is not None and page.places[persisted[-1].tier] == persisted[-1].slot
    assert page.places.keys() == set(page.copies or ())
    after = first.events[-1].number
    await asyncio.to_thread(live.clear_device)
    board._due_s = float("-inf")
    later = convert(await board.answer(engine, tokenizer, {"events_after": after}), TopAnswer)
    assert later.events and all(row.number > after for row in later.events)
    assert {row.kind for row in later.events} <= {"evict", "demote"}


def spoil_slabs(cache: Path) -> None:
    """A flipped bit in every 512 bytes that are stored."""
    for slab in cache.rglob("slab-*.pages"):
        held = bytearray(slab.read_bytes())
        for at in range(100, len(held), 512):
            held[at] ^= 1
        with slab.open("r+b") as file:
            file.write(held)


async def test_the_copy_on_disk_is_read_and_judged(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    engine, board = live.engine, live.engine.top
    await asyncio.to_thread(live.run, [{"tokens": PROMPT, "max_tokens": 8}])
    await asyncio.to_thread(live.flush)
    node = next(node for node in engine.pager.index.nodes.values() if node.durable and node.device >= 0)
    asked = {"tier": "device", "slot": node.device}

    async def detail(**asked: Any) -> PageDetail:
        return convert(await board.detail(engine, tokenizer, asked), PageDetail)

    assert (await detail(**asked)).checksum == "good"
    spoil_slabs(Path(live.config.cache_dir))
    assert (await detail(key=node.key.hex())).checksum == "unread"
    assert (await detail(**asked)).checksum == "bad" and engine.pager.promoter.damaged_pages == 1
    assert any(entry.what is What.DAMAGE for entry in engine.pager.residency.journal.since(0))
    await asyncio.to_thread(live.flush)
    after = await detail(**asked)
    assert after.checksum == "good", "memory had a copy, which was written anew"
    assert await asyncio.wrap_future(engine.loop.call(engine.pager.check)) == []


async def test_weights_and_plan_are_told_with_what_they_rest_on(live: Live, tokenizer: ThreadPoolExecutor) -> None:
    engine, board = live.engine, live.engine.top
    seen = TopAnswer()
    async with asyncio.timeout(60.0):
        while not seen.plan or seen.plan[0].measured is None:  # an answer may be over before anybody looks
            numbers = [live.submit(tokens=[*PROMPT, 60 + number], max_tokens=60) for number in range(4)]
            for _ in range(20):
                seen = convert(await board.answer(engine, tokenizer, {}), TopAnswer)
                await asyncio.sleep(0.005)
            await asyncio.to_thread(live.collect, *numbers)
    assert "assumed rates" in seen.plan_note
    names = [row.name for row in seen.plan]
    assert names[0].startswith("decode, ") and names[-1] == "weights in memory"
    assert all(row.planned > 0 for row in seen.plan)
    assert seen.plan[-1].measured == seen.plan[-1].planned == engine.weights.total_bytes
    assert seen.weights is not None and sum(row.bytes for row in seen.weights) == engine.weights.total_bytes
    assert {row.tier for row in seen.weights} == {"device"}


@pytest.mark.long
@pytest.mark.parametrize("slice_s", [top.FIRST_IDLE_SLICE_S, 0.0])
async def test_the_first_answer_has_the_tree_or_says_that_it_is_to_come(
    live: Live, tokenizer: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    monkeypatch.setattr(top, "FIRST_IDLE_SLICE_S", slice_s)
    board, engine, screen = live.engine.top, live.engine, Assembler()
    report = DaemonReport(model=engine.model, engines=(EngineReport(engine.model, "ready", 7),))
    live.run([{"tokens": [*PROMPT, 60 + number], "max_tokens": 2} for number in range(3)])
    live.flush()
    shown = screen.take(1.0, None, report, convert(await board.answer(engine, tokenizer, {}), TopAnswer))
    assert shown.prefixes_pending == (slice_s == 0.0) == (not shown.prefixes)
    async with asyncio.timeout(30.0):
        while shown.prefixes_pending:
            live.engine.loop.call(lambda: setattr(board, "_due_s", 0.0)).result(10.0)
            have = {"prefixes": screen.snapshot.prefixes_version}
            answer = convert(await board.answer(engine, tokenizer, have), TopAnswer)
            shown = screen.take(2.0, None, report, answer)
    assert shown.prefixes


async def test_links_tell_what_they_can_do_and_when_computing_waits_for_them(
    model: Path, tmp_path: Path, tokenizer: ThreadPoolExecutor
) -> None:
    with Live(model, tmp_path / "cache", device=32, host=0, nvme=64) as live:
        engine, board, screen = live.engine, live.engine.top, Assembler()

        async def look(at_s: float) -> dict[str, LinkView]:
            live.engine.loop.call(lambda: setattr(board, "_due_s", 0.0)).result(10.0)
            answer = convert(await board.answer(engine, tokenizer, {}), TopAnswer)
            report = EngineReport(model=answer.model, state="ready", pid=1)
            seen = screen.take(at_s, None, DaemonReport(model=answer.model, pid=1, engines=(report,)), answer)
            return {link.name: link for link in seen.links}

        live.run([{"tokens": PROMPT, "max_tokens": 2}])
        live.flush()
        live.clear_device()
        before = await look(0.0)
        assert before["disk_read"].report.compute_wait_s == 0.0
        engine.pager.mover._before = lambda job: time.sleep(0.05 * (job.link is Link.DISK_READ))
        live.run([{"tokens": PROMPT, "max_tokens": 2}])
        after = await look(1.0)
        read, written = after["disk_read"], after["disk_write"]
        assert (read.report.compute_wait_s or 0.0) > 0.02 and read.waits[-1]
        assert (read.report.peak_bytes_per_s or 0.0) >= (read.report.p99_bytes_per_s or 0.0) > 0.0
        assert written.report.compute_wait_s == 0.0 and not any(written.waits)


@pytest.mark.long
async def test_watching_costs_less_than_one_part_in_200_of_the_step_thread(
    live: Live, tokenizer: ThreadPoolExecutor
) -> None:
    engine, board, spent_s = live.engine, live.engine.top, 0.0
    refresh = board.refresh

    def measured() -> None:
        nonlocal spent_s
        began_s = time.thread_time()  # what others do on this machine meanwhile is not its cost
        refresh()
        spent_s += time.thread_time() - began_s

    board.refresh = measured  # type: ignore[method-assign]
    numbers = [live.submit(tokens=[*PROMPT, 60 + number], max_tokens=400) for number in range(4)]
    await board.answer(engine, tokenizer, {})
    spent_s, began_s = 0.0, time.perf_counter()
    while time.perf_counter() - began_s < 8.0:
        await board.answer(engine, tokenizer, {})
        await asyncio.sleep(0.02)
    for number in numbers:
        engine.loop.cancel(number)
    assert spent_s < 0.005 * (time.perf_counter() - began_s) + 0.01
