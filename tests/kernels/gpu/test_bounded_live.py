"""Whole engines on a made-up card whose rows have bounds: the tokens of the CPU, wherever the pages were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.live import Live, record_bytes
from tests.kernels.gpu.cards import ExactCard, prepared
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble

CONTEXT = 64
MODES = ("window=20", "sinks=3,window=18", None)

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]
Make = Callable[..., Live]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return prepared(tmp_path, "fp32", 1, CONTEXT)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Engines that are built from then on compute on the card."""
    return lambda: monkeypatch.setattr(assemble, "choose", lambda _threads, note, *_: ExactCard(FakeGpu(3), note))


def prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300) for _ in range(length)]


def asks() -> list[dict[str, Any]]:
    """From one beginning; the one with sinks goes beyond the context."""
    found: list[dict[str, Any]] = []
    for number, mode in enumerate(MODES):
        endless = mode is not None and "sinks" in mode
        tokens = prompt(1, 18) + prompt(number + 2, 40 if endless else 9)
        found.append({"tokens": tokens, "max_tokens": 12} | ({"kv_mode": mode} if mode else {}))
    return found


def said(live: Live, asks: list[dict[str, Any]]) -> list[list[int]]:
    found = live.run(asks, timeout_s=300)
    assert [end.ev for _, end in found] == ["done"] * len(asks), found
    assert live.engine.loop.call(live.engine.pager.check).result(10.0) == []
    return [tokens for tokens, _ in found]


def test_the_tokens_of_the_cpu_cold_and_in_company(
    model: Path, tmp_path: Path, on_card: Callable[[], None]
) -> None:
    wanted = asks()
    with Live(model, tmp_path / "cpu", device=60, nvme=0) as live:
        right = said(live, wanted)
        assert said(live, [ask | {"kv_mode": "exact"} for ask in wanted])[:1] != right[:1]
    on_card()
    with Live(model, tmp_path / "card", device=60, nvme=60, max_batch_rows=40) as live:
        assert live.engine.on_card and said(live, wanted) == right


@pytest.mark.long
def test_restored_streamed_and_resumed(model: Path, tmp_path: Path, on_card: Callable[[], None]) -> None:
    wanted = asks()
    with Live(model, tmp_path / "cpu", device=60, nvme=0) as live:
        right = said(live, wanted)
        again = {"tokens": [*wanted[0]["tokens"], *right[0]], "max_tokens": 8}
        (exact,) = said(live, [again])
    on_card()
    with Live(model, tmp_path / "store", device=60, nvme=60, max_batch_rows=40) as live:
        assert [said(live, [ask])[0] for ask in wanted] == right
        ((tokens, end),) = live.run([again])  # of the text before it what was bounded is not used
        assert tokens == exact and 16 <= end.data["usage"].cached_tokens < 32
        resumed = [ask | {"resume": tuple(tokens[:7])} for ask, tokens in zip(wanted, right, strict=True)]
        assert said(live, resumed) == [tokens[7:] for tokens in right]
        live.flush()
    with Live(model, tmp_path / "store", device=60, nvme=60, max_batch_rows=40) as live:
        found = live.run(wanted, timeout_s=300)
        assert [tokens for tokens, _ in found] == right
        assert all(end.data["timings"].hit_nvme >= 16 for _, end in found)
    with Live(model, tmp_path / "store", device=5, nvme=60, max_streams=2, max_batch_rows=24) as live:
        assert [said(live, [ask])[0] for ask in wanted] == right


@pytest.mark.long
def test_pages_that_no_row_of_a_trained_window_sees_leave_the_card(
    tmp_path: Path, on_card: Callable[[], None]
) -> None:
    """A text of 40 pages with room for 24, and for what is computed at once; hardly anything is read in a step."""
    model = prepared(
        tmp_path, "fp32", 1, 1024, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=40,
        attention_bias=False,
    )  # fmt: skip
    ask = {"tokens": prompt(1, 600), "max_tokens": 30}
    with Live(model, tmp_path / "cpu", device=60, nvme=0) as live:
        right = said(live, [ask])
    on_card()
    with Live(model, tmp_path / "card", device=24, nvme=100, max_streams=2, max_batch_rows=64) as live:
        assert said(live, [ask]) == right
        assert live.engine.pager.statistics().spills > 0
        read_bytes = live.engine.loop.call(lambda: live.engine.top._streams.streaming["read_bytes"]).result(10.0)
        assert read_bytes < 60 * record_bytes(model, "fp32")
        live.flush()
    with Live(model, tmp_path / "card", device=24, nvme=100, max_batch_rows=64) as live:
        again = {"tokens": [*ask["tokens"], *right[0][:10]], "max_tokens": 5}
        ((tokens, end),) = live.run([again], timeout_s=300)
        assert tokens == right[0][10:15] and end.data["usage"].cached_tokens >= 592
        assert 0 < live.engine.pager.statistics().loaded_pages <= 20


@pytest.mark.long
def test_thinned_pages_cold_restored_and_resumed(tmp_path: Path, on_card: Callable[[], None]) -> None:
    """The same pages are given up as on the CPU."""
    model = prepared(tmp_path, "fp32", 1, 256)
    begin = prompt(1, 90)
    wanted: list[dict[str, Any]] = [
        {"tokens": begin + prompt(2, 6), "max_tokens": 40, "kv_mode": "h2o=64"},
        {"tokens": begin + prompt(3, 6), "max_tokens": 6},
        {"tokens": prompt(4, 20), "max_tokens": 60, "kv_mode": "h2o=64"},
    ]
    with Live(model, tmp_path / "cpu", device=60, nvme=0) as live:
        right = said(live, wanted)
        assert said(live, [ask | {"kv_mode": "exact"} for ask in wanted])[0] != right[0]
    on_card()
    with Live(model, tmp_path / "card", device=60, nvme=60) as live:
        assert said(live, wanted) == right
        assert said(live, [wanted[0] | {"resume": tuple(right[0][:19])}]) == [right[0][19:]]
        live.flush()
    with Live(model, tmp_path / "card", device=7, nvme=60, max_streams=2, max_batch_rows=24) as live:
        ((tokens, end),) = live.run(wanted[:1], timeout_s=300)
        assert tokens == right[0] and end.data["timings"].hit_nvme >= 64
