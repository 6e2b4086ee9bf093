"""Prefixes and sizes of a whole engine with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tierd.daemon.engine import tend
from tierd.daemon.errors import BadRequest, Conflict, EngineFailed, NotFound, OutOfSpace, TierdError, Unsupported
from tierd.tiers.arena import SlotState
from tierd.tiers.keys import pack_tokens, page_key
from tierd.tiers.prefix import Node
from tierd.tiers.store import PageMeta

PROMPT = list(range(20, 60))

REFUSED_PREFIXES: list[tuple[dict[str, Any], type[TierdError]]] = [
    ({"action": "pin", "id": "0000"}, NotFound),
    ({"action": "drop", "id": "xyz!"}, NotFound),
    ({"action": "sell"}, Unsupported),
    ({"action": "ls", "limit": 0}, BadRequest),
    ({"action": "ls", "limit": "many"}, BadRequest),
    ({}, BadRequest),
]
REFUSED_SIZES: list[dict[str, Any]] = [
    {}, {"device_bytes": 0}, {"device_bytes": 3}, {"host_bytes": -1}, {"device_bytes": "x"}, {"timeout_s": 3},
    {"host_bytes": 0, "timeout_s": 1e9}, {"host_bytes": 0, "speed": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("tend") / "model")


@pytest.fixture
def live(model: Path, tmp_path: Path) -> Iterator[Live]:
    with Live(model, tmp_path / "cache", device=32, host=16, nvme=64) as live:
        yield live


async def prefix(live: Live, **args: Any) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as tokenizer:
        return await tend.prefix(live.engine, tokenizer, args)


async def resize(live: Live, device: int | None = None, host: int | None = None, **more: Any) -> dict[str, Any]:
    record_bytes = live.engine.pager.device.record_bytes
    sizes = {"device_bytes": device, "host_bytes": host}
    args = {name: pages * record_bytes for name, pages in sizes.items() if pages is not None}
    return await tend.resize(live.engine, args | more)


async def test_prefixes_are_listed_with_their_text_pinned_and_dropped(live: Live) -> None:
    live.run([{"tokens": PROMPT, "max_tokens": 8}])
    answer = await prefix(live, action="ls")
    [one] = answer["prefixes"]
    assert answer["total"] == 1
    assert one["tokens"] == 47 and one["pages"] == 3
    assert one["text"].startswith(live.engine.intake.text_of(PROMPT[:30]))
    assert await prefix(live, action="pin", id=one["id"][:10]) == {"pages": 3}
    assert (await prefix(live, action="ls", limit=1))["prefixes"][0]["pinned"]
    await asyncio.to_thread(live.flush)  # a page that is being written can't be dropped
    with pytest.raises(Conflict, match="pinned"):
        await prefix(live, action="drop", id=one["id"])
    assert await prefix(live, action="unpin", id=one["id"]) == {"pages": 3}
    assert await prefix(live, action="drop", id=one["id"]) == {"pages": 3}
    assert await prefix(live, action="ls") == {"prefixes": [], "total": 0}


async def test_pins_outlive_the_engine(model: Path, tmp_path: Path) -> None:
    with Live(model, tmp_path / "cache", device=16, nvme=32) as live:
        live.run([{"tokens": PROMPT, "max_tokens": 8}])
        [one] = (await prefix(live, action="ls"))["prefixes"]
        await prefix(live, action="pin", id=one["id"])
        live.flush()
    with Live(model, tmp_path / "cache", device=16, nvme=32) as live:
        [again] = (await prefix(live, action="ls"))["prefixes"]
        assert again["id"] == one["id"] and again["pinned"]


async def test_prefix_refusals(live: Live) -> None:
    for args, error in REFUSED_PREFIXES:
        with pytest.raises(error):
            await prefix(live, **args)


async def test_sizes_change_while_streams_go_on_and_no_token_does(live: Live) -> None:
    submits = [{"tokens": [*PROMPT, 60 + number], "max_tokens": 60} for number in range(4)]
    wanted = [tokens for tokens, _ in live.run(submits)]
    live.engine.loop.call(live.engine.pager.clear).result(5)
    numbers = [live.submit(**submit) for submit in submits]
    for device, host in ((20, 12), (32, 2), (40, 16), (18, 16), (32, 8)):
        try:
            sizes = await resize(live, device, host)
        except OutOfSpace as exc:
            assert "need" in str(exc)
        else:
            assert (sizes["device_pages"], sizes["host_pages"]) == (device, host)
        await asyncio.sleep(0.02)
    found = await asyncio.to_thread(live.collect, *numbers)
    assert [found[number][0] for number in numbers] == wanted
    assert live.engine.loop.call(live.engine.pager.check).result(5) == []


async def test_exact_copies_count_beside_what_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Live(model, tmp_path, device=8, nvme=0, kv_format="k8v4", kv_exact_first=32, kv_exact_last=64) as live:
        engine = live.engine
        copies = engine.copies_bytes
        ladders, record_bytes = engine.loop._streams.ladders, engine.pager.device.record_bytes
        assert ladders is not None and copies == ladders.pages.statistics().total_bytes + record_bytes
        monkeypatch.setattr(tend, "total_memory_bytes", lambda: 20 * record_bytes + copies)
        assert (await resize(live, 20))["device_pages"] == 20
        with pytest.raises(OutOfSpace, match="of exact copies are more than this machine's memory"):
            await resize(live, 21)


async def test_what_one_sequence_may_have_follows_the_sizes(model: Path, tmp_path: Path) -> None:
    with Live(model, tmp_path / "cache", device=8, nvme=0, context=128) as live:
        assert live.engine.intake.facts.capacity_tokens == 8 * 16
        assert (await resize(live, 4))["device_pages"] == 4
        assert live.engine.intake.facts.capacity_tokens == 4 * 16
        assert (await resize(live, 20, 4))["host_pages"] == 4
        assert live.engine.intake.facts.capacity_tokens == 128


async def test_more_than_the_machine_has_is_refused_with_the_number_that_fits(live: Live) -> None:
    with pytest.raises(OutOfSpace, match=r"\d GB of device memory would fit"):
        await resize(live, device_bytes=1 << 50)
    with pytest.raises(OutOfSpace, match=r"\d GB of host memory would fit"):
        await resize(live, host_bytes=1 << 50)
    assert live.engine.pager.device.slots == 32


async def test_resize_refusals(live: Live) -> None:
    for args in REFUSED_SIZES:
        with pytest.raises(BadRequest):
            await resize(live, **args)
    assert live.engine.pager.device.slots == 32


async def test_less_than_a_page_is_refused_with_what_a_page_takes(live: Live) -> None:
    with pytest.raises(BadRequest, match=r"^1.0 kB of device memory hold no page: one takes \d.* kB$") as caught:
        await resize(live, device_bytes=1000)
    assert "1,000 tokens" in str(caught.value.hint)


async def test_a_loop_that_has_ended_ends_the_wait_for_a_resize(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pager = live.engine.pager
    slots = [pager.device.alloc(SlotState.FILLING) for _ in range(32)]
    monkeypatch.setattr(type(live.engine.loop), "alive", False)
    with pytest.raises(EngineFailed, match="stopped"):
        await asyncio.wait_for(resize(live, 4), 5)
    monkeypatch.undo()
    for slot in slots:
        assert slot is not None
        pager.device.drop(slot)


async def test_what_does_not_become_free_in_time_is_told(live: Live) -> None:
    pager = live.engine.pager
    slots = [pager.device.alloc(SlotState.FILLING) for _ in range(32)]
    with pytest.raises(OutOfSpace, match=r"28 pages of device memory beyond 4 are still in use after 0.1 s"):
        await resize(live, 4, timeout_s=0.1)
    assert pager.device.slots == 32
    for slot in slots:
        assert slot is not None
        pager.device.drop(slot)


async def test_a_refusal_leaves_the_weights_as_they_are(live: Live) -> None:
    weights = live.engine.weights
    whole_bytes = weights.memory_bytes
    for args in ({"weights_bytes": 1}, {"weights_bytes": whole_bytes - 1, "device_bytes": 3}):
        with pytest.raises((OutOfSpace, BadRequest)):
            await resize(live, **args)
    assert weights.statistics().memory_bytes == whole_bytes


def filled(live: Live, pages: int) -> None:
    """Puts so many pages into the store; their bytes mean nothing, their checksums are right."""
    pager = live.engine.pager
    store, parent = pager.store, pager.root
    assert store is not None
    record = np.zeros(pager.device.record_bytes, np.uint8)
    metas = []
    for number in range(pages):
        tokens = tuple(range(number, number + 16))
        parent = page_key(parent, pack_tokens(tokens))
        metas.append(PageMeta(parent, metas[-1].key if metas else pager.root, tokens, 0, 0.0))
    store.write([(meta, record) for meta in metas])

    def known() -> None:
        nodes = [Node(meta.key, meta.parent, pack_tokens(meta.tokens)) for meta in metas]
        pager.residency.load(nodes)

    live.engine.loop.call(known).result(20)


@pytest.fixture
def much(model: Path, tmp_path: Path) -> Iterator[Live]:
    """An engine with thousands of pages in its store, and a long answer that has begun."""
    with Live(model, tmp_path / "cache", device=32, host=0, nvme=3000) as live:
        filled(live, 2500)
        live.submit(tokens=PROMPT, max_tokens=80)
        yield live


async def test_verify_goes_on_beside_a_stream_and_tells_how_far_it_is(much: Live) -> None:
    told: list[dict[str, Any]] = []
    totals = much.engine.loop._streams.totals
    before = totals.generated_tokens
    answer = await tend.verify(much.engine, False, told.append)
    assert answer["findings"] == [] and answer["pages"] >= 2500
    assert totals.generated_tokens > before + 5, "the stream went on"
    assert told and all(event["stage"] == "verify" and event["total"] >= 2500 for event in told)
    assert [event["done"] for event in told] == sorted(event["done"] for event in told)
    ((tokens, end),) = (await asyncio.to_thread(much.collect, 1)).values()
    assert end.ev == "done" and len(tokens) == 80


async def test_verify_that_is_cancelled_ends_at_once(much: Live) -> None:
    begun = asyncio.Event()
    verifying = asyncio.create_task(tend.verify(much.engine, True, lambda _data: begun.set()))
    await asyncio.wait_for(begun.wait(), 20)
    verifying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(verifying, 20)
    answer = await tend.verify(much.engine, False, lambda _data: None)
    assert answer["findings"] == []


async def test_verify_keeps_its_deadline(much: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tend, "VERIFY_TIMEOUT_S", 0.0)
    answer = await tend.verify(much.engine, False, lambda _data: None)
    (finding,) = answer["findings"]
    assert finding.startswith("stopped, for its time was over: 0 of ")


async def test_gc_goes_on_beside_a_stream(much: Live) -> None:
    pager = much.engine.pager
    second = list(pager.index.nodes.values())[1]

    def lose() -> None:
        pager.residency.drop_row(second)
        pager.residency.settle(second)

    much.engine.loop.call(lose).result(20)
    before = pager.store.statistics().used_slots if pager.store is not None else 0
    answer = await tend.gc(much.engine)
    assert answer["removed_pages"] >= 2498
    assert pager.store is not None and pager.store.statistics().used_slots < before - 2400
    ((tokens, end),) = (await asyncio.to_thread(much.collect, 1)).values()
    assert end.ev == "done" and len(tokens) == 80


def test_exact_copies_on_a_card_take_none_of_ram() -> None:
    arena = SimpleNamespace(slots=4, record_bytes=100)
    engine: Any = SimpleNamespace(pager=SimpleNamespace(device=arena, host=arena), copies_bytes=10**6, on_card=True)
    wanted = tend._Resize(device_bytes=None, host_bytes=800, weights_bytes=None)
    tend._check_memory(wanted, engine, 800)
    engine.on_card = False
    with pytest.raises(OutOfSpace, match="of exact copies"):
        tend._check_memory(wanted, engine, 800)
