"""The edges of the tiers, with a whole engine: prompts around page boundaries, arenas of a page, a store that goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live

PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE)
ASKS = [{"tokens": [(7 * length + place) % 300 for place in range(length)], "max_tokens": 6} for length in LENGTHS]

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("edges") / "model")


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with Live(model, tmp_path_factory.mktemp("plenty"), device=128, nvme=0) as live:
        return [tokens for tokens, _ in live.run(ASKS)]


@pytest.mark.parametrize(("device", "host", "nvme"), [(1, 0, 64), (1, 1, 64), (2, 1, 64), (64, 0, 0)])
def test_prompts_around_page_boundaries(
    model: Path, tmp_path: Path, right: list[list[int]], device: int, host: int, nvme: int
) -> None:
    for when in ("cold", "from the store"):
        with Live(model, tmp_path / "cache", device=device, host=host, nvme=nvme) as live:
            for _ in range(2):
                found = live.run(ASKS)
                assert [tokens for tokens, _ in found] == right, when
                for ask, (_, end) in zip(ASKS, found, strict=True):
                    usage = end.data["usage"]
                    assert end.ev == "done" and usage.prompt_tokens == len(ask["tokens"])
                    assert usage.cached_tokens < usage.prompt_tokens, "one token at least is computed"
            live.flush()
            assert live.engine.loop.call(live.engine.pager.check).result(20) == []


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def replace_by_link(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to(directory.with_name("elsewhere"))


def replace_by_another(directory: Path) -> None:
    remove(directory)
    directory.mkdir()


@pytest.mark.parametrize("change", [remove, replace_by_link, replace_by_another])
def test_the_directory_of_the_store_goes_while_a_stream_runs(
    model: Path, tmp_path: Path, right: list[list[int]], change: Callable[[Path], None]
) -> None:
    with Live(model, tmp_path / "cache", device=32, host=0, nvme=64) as live:
        assert [tokens for tokens, _ in live.run(ASKS)] == right
        live.flush()
        running = live.submit(tokens=ASKS[0]["tokens"], max_tokens=60)
        change(tmp_path / "cache" / live.engine.namespace)
        asked = [live.submit(**ask) for ask in ASKS]
        found = live.collect(running, *asked)
        assert [found[number][0] for number in asked] == right
        tokens, end = found[running]
        assert end.ev == "done" and tokens[:6] == right[0] and len(tokens) == 60
        live.engine.loop.flush(20).result(25)  # it has something to write: now at the latest it finds out
        assert "was removed or replaced" in live.engine.pager.writeback.off_reason
        assert [tokens for tokens, _ in live.run(ASKS)] == right
        assert live.engine.loop.call(live.engine.pager.check).result(20) == []


def test_a_file_system_that_fills_while_streams_run(model: Path, tmp_path: Path, right: list[list[int]]) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    with Live(model, tmp_path / "cache", device=32, nvme=64, nvme_min_free_bytes=2 * free_bytes) as live:
        for _ in range(2):
            assert [tokens for tokens, _ in live.run(ASKS)] == right
        assert live.engine.loop.flush(0.5).result(25) > 0
        assert live.engine.pager.writeback.on, "there may be room again"
        assert live.engine.loop.call(live.engine.pager.check).result(20) == []
    told = [event.data["text"] for event in live.events.queue if event.ev == "notice"]
    assert len(told) == 1 and "the NVMe tier is full: " in told[0]
