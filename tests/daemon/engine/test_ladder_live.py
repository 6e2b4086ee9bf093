"""The precision ladder through a whole engine with real kernels: the tokens are the same whatever copies were left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live

CONTEXT = 300
LADDER = {"kv_exact_first": 32, "kv_exact_last": 64, "kv_format": "k4v4"}
MODE = "exact_first=32,exact_last=64"

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = reference("llama", max_position_embeddings=CONTEXT)
    return prepare(tiny, tmp_path_factory.mktemp("ladder"))


def prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(length)]


def checked(live: Live) -> list[str]:
    engine, ladders = live.engine, live.engine.loop._streams.ladders
    assert ladders is not None
    pages = ladders.pages
    findings: list[str] = engine.loop.call(lambda: engine.pager.check() + pages.check()).result(10.0)
    used = pages.arena.used
    return findings + ([f"{used} copies are pinned by nobody"] if used else [])


def said(live: Live, asks: list[dict[str, Any]]) -> list[list[int]]:
    """Answers of requests that run at once; nothing is left over."""
    found = live.run(asks)
    assert [end.ev for _, end in found] == ["done"] * len(asks)
    assert checked(live) == []
    return [tokens for tokens, _ in found]


def cached(live: Live, ask: dict[str, Any]) -> tuple[list[int], int]:
    [(tokens, end)] = live.run([ask])
    assert checked(live) == []
    return tokens, end.data["usage"].cached_tokens


def asks() -> list[dict[str, Any]]:
    """From one beginning, some of them under a ladder."""
    begin = prompt(1, 150)
    modes = (MODE, "exact_first=0,exact_last=32", "exact", MODE, "select=4")
    return [
        {"tokens": begin + prompt(number + 2, 10 * number), "max_tokens": 40, "kv_mode": mode}
        for number, mode in enumerate(modes)
    ]


def test_cold_restored_streamed_chunked_and_in_company(model: Path, tmp_path: Path) -> None:
    """An engine with plenty of memory, one request after the other, is right."""
    wanted = asks()
    with Live(model, tmp_path / "plenty", device=400, nvme=0, **LADDER) as live:
        right = [said(live, [ask])[0] for ask in wanted]
        again = [cached(live, ask) for ask in wanted]
        assert [tokens for tokens, _ in again] == right
        # The newest turn finds its head and its tail; of another one copies may have gone.
        assert again[-1][1] == len(wanted[-1]["tokens"]) - 1
    assert len({tuple(tokens) for tokens in right}) == len(right)
    with Live(model, tmp_path / "store", device=100, nvme=400, **LADDER) as live:
        assert said(live, wanted) == right
        live.flush()
    with Live(model, tmp_path / "store", device=100, nvme=400, **LADDER) as live:
        restored = [cached(live, ask) for ask in wanted]
        assert [tokens for tokens, _ in restored] == right
        length = len(wanted[0]["tokens"]) - 1
        # What lacks is computed: the first 32 tokens, and those of the last block. (Later ones may find that computing
        # is sooner than loading.)
        assert restored[0][1] == length - 32 - length % 64
    with Live(model, tmp_path / "store", device=7, nvme=400, max_streams=2, max_batch_rows=24, **LADDER) as live:
        assert [said(live, [ask])[0] for ask in wanted] == right
    with Live(model, tmp_path / "few", device=40, nvme=0, max_streams=2, max_batch_rows=9, **LADDER) as live:
        assert said(live, wanted) == right
