"""Models whose every layer was trained with a window: pages that no row sees any more leave memory, and stay known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live, record_bytes

CONTEXT, WINDOW = 1024, 40
STORE, SMALL = {"nvme": 400}, {"device": 20, "max_streams": 2, "max_batch_rows": 24}
# Sums begin at multiples of 256 tokens: pages from there on, those of a window, and the one that is written.
MOST_PAGES = 256 // 16 + 4

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = reference("mistral, sliding window", sliding_window=WINDOW, max_position_embeddings=CONTEXT)
    return prepare(tiny, tmp_path_factory.mktemp("trained"))


def ask(seed: int, length: int = 600) -> dict[str, Any]:
    chance = random.Random(seed)
    return {"tokens": [chance.randrange(300) for _ in range(length)], "max_tokens": 30}


def right(model: Path, path: Path, *asks: dict[str, Any]) -> list[list[int]]:
    with Live(model, path, device=400, nvme=0) as live:
        return [live.run([one])[0][0] for one in asks]


def streamed_bytes(live: Live) -> float:
    return live.engine.top._streams.streaming["read_bytes"]


def test_a_text_far_longer_than_the_device_hardly_reads_from_the_store(model: Path, tmp_path: Path) -> None:
    wanted = right(model, tmp_path / "plenty", ask(1))
    with Live(model, tmp_path / "small", **STORE, **SMALL) as live:
        ((tokens, end),) = live.run([ask(1)])
        assert end.ev == "done" and [tokens] == wanted
        assert live.engine.pager.statistics().spills > 0
        # Nothing, but where the disk writes so late that a page in sight goes before those behind it. Each of the 30
        # steps would read 20 pages and more of a text that is seen whole.
        assert live.engine.loop.call(lambda: streamed_bytes(live)).result(10.0) < 60 * record_bytes(model, "fp32")
        assert live.engine.loop.call(live.engine.pager.check).result(10.0) == []


def test_only_what_is_seen_is_loaded_of_a_known_text(model: Path, tmp_path: Path) -> None:
    first, longer = ask(2), ask(2)
    with Live(model, tmp_path / "kv", device=100, **STORE) as live:
        ((said, _),) = live.run([first])
        live.flush()
    longer["tokens"] = [*first["tokens"], *said]
    wanted = right(model, tmp_path / "plenty", longer)
    with Live(model, tmp_path / "kv", device=100, **STORE) as live:
        ((tokens, end),) = live.run([longer])
        assert [tokens] == wanted
        assert end.data["usage"].cached_tokens >= 600
        assert 0 < live.engine.pager.statistics().loaded_pages <= MOST_PAGES
        assert live.engine.loop.call(live.engine.pager.check).result(10.0) == []
