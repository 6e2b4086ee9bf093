"""Windows and sinks through a whole engine with real kernels: the tokens are the same wherever the pages were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.counts import counted
from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live

CONTEXT = 128
ENDLESS = counted(3 * CONTEXT + 20, 2 * CONTEXT)
MODES = ("window=40", "sinks=5,window=48", "sinks=20,window=33")

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = reference("llama", max_position_embeddings=CONTEXT)
    return prepare(tiny, tmp_path_factory.mktemp("bounded"))


def prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(length)]


def said(live: Live, asks: list[dict[str, Any]]) -> list[list[int]]:
    """Answers of requests that run at once; nothing is left over."""
    found = live.run(asks)
    assert [end.ev for _, end in found] == ["done"] * len(asks)
    assert live.engine.loop.call(live.engine.pager.check).result(10.0) == []
    return [tokens for tokens, _ in found]


def asks() -> list[dict[str, Any]]:
    """Each mode and none, from one beginning; those with sinks go on beyond the context."""
    begin = prompt(1, 60)
    found: list[dict[str, Any]] = []
    for number, mode in enumerate((*MODES, None)):
        endless = mode is not None and "sinks" in mode
        tokens = begin + prompt(number + 2, 16 if not endless else 150)
        found.append({"tokens": tokens, "max_tokens": 36 if not endless else ENDLESS - len(tokens)})
        found[-1] |= {"kv_mode": mode} if mode else {}
    return found


def test_cold_restored_streamed_and_in_company(model: Path, tmp_path: Path) -> None:
    """An engine with plenty of memory, one request after the other, is right."""
    wanted = asks()
    with Live(model, tmp_path / "plenty", device=400, nvme=0) as live:
        right = [said(live, [ask])[0] for ask in wanted]
    for ask in wanted[1:3]:
        assert len(ask["tokens"]) + ask["max_tokens"] == ENDLESS
    with Live(model, tmp_path / "store", device=100, nvme=400) as live:
        assert said(live, wanted) == right
        live.flush()
    with Live(model, tmp_path / "store", device=100, nvme=400) as live:
        found = live.run(wanted)
        assert [tokens for tokens, _ in found] == right
        assert all(end.data["timings"].hit_nvme >= 32 for _, end in found)
    with Live(model, tmp_path / "store", device=7, nvme=400, max_streams=2, max_batch_rows=24) as live:
        assert [said(live, [ask])[0] for ask in wanted] == right


def pages(live: Live) -> dict[bytes, bytes]:
    """What every full page on the device holds, by its key."""
    pager = live.engine.pager
    found: dict[bytes, bytes] = live.engine.loop.call(
        lambda: {
            node.key: pager.device.row(node.device).tobytes()
            for node in pager.index.nodes.values()
            if node.device >= 0 and node.num_tokens == pager.page_tokens
        }
    ).result(10.0)
    return found


@pytest.mark.parametrize("seed", range(counted(12, 1)))
def test_after_a_mode_an_exact_request_has_what_a_cold_one_has(model: Path, tmp_path: Path, seed: int) -> None:
    """Its tokens, and to the last bit what every page under a key holds."""
    chance = random.Random(seed)
    ask: dict[str, Any] = {
        "tokens": prompt(seed, chance.randint(60, 120)), "max_tokens": chance.randint(1, 30),
        "kv_mode": chance.choice(MODES),
    }  # fmt: skip
    with Live(model, tmp_path / "used", device=100, nvme=200) as live:
        (bounded,) = said(live, [ask])
        again = {"tokens": [*ask["tokens"], *bounded][: CONTEXT - 9], "max_tokens": 8}
        ((warm, end),) = live.run([again])
        assert end.data["usage"].cached_tokens >= 32
        used = pages(live)
        live.flush()
    with Live(model, tmp_path / "used", device=100, nvme=200) as live:
        restored = said(live, [again])[0]
    with Live(model, tmp_path / "cold", device=100, nvme=0) as live:
        cold = said(live, [again])[0]
        right = pages(live)
    assert warm == restored == cold
    assert used == right and len(used) >= 4
