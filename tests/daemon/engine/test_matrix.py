"""Every size of every tier, with contexts far beyond the device: the tokens are those of an engine with much memory.

A whole engine with real kernels, threads, files; the model is tiny and random, so that a context of 8,192 tokens takes
a second.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live

PAGE = 16
PLENTY = 5000
CONTEXT = 8192

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]

DEVICES, HOSTS, DISKS, STREAMS = (8, 32, 128, PLENTY), (0, 64, PLENTY), (0, PLENTY), (1, 8)
ALL = [(device, host, nvme, streams) for device in DEVICES for host in HOSTS for nvme in DISKS for streams in STREAMS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference_model = reference("llama", max_position_embeddings=CONTEXT)
    return prepare(reference_model, tmp_path_factory.mktemp("matrix"))


def prompt(number: int, length: int) -> list[int]:
    return [random.Random(number * 1000 + place // 7).randrange(300) for place in range(length)]


def asks(longest: int, streams: int) -> list[dict[str, Any]]:
    """Prompts of all lengths around page boundaries, one near the longest that fits."""
    lengths = [longest - 24] if streams == 1 else [longest - 24, longest // 2, longest // 3, 1, 15, 16, 17, 160]
    return [{"tokens": prompt(n, min(length, longest - 24)), "max_tokens": 12} for n, length in enumerate(lengths)]


class Answers:
    """What an engine with plenty of everything says, computed once."""

    def __init__(self, model: Path, cache_dir: Path) -> None:
        self._model, self._cache_dir = model, cache_dir
        self._known: dict[tuple[int, ...], list[int]] = {}

    def of(self, wanted: list[dict[str, Any]]) -> list[list[int]]:
        missing = [ask for ask in wanted if tuple(ask["tokens"]) not in self._known]
        if missing:
            with Live(self._model, self._cache_dir, device=PLENTY, nvme=0, context=CONTEXT) as live:
                for ask in missing:
                    ((tokens, end),) = live.run([ask])
                    assert end.ev == "done" and len(tokens) == ask["max_tokens"]
                    self._known[tuple(ask["tokens"])] = tokens
        return [self._known[tuple(ask["tokens"])] for ask in wanted]


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(model, tmp_path_factory.mktemp("plenty"))


def check(
    model: Path, cache_dir: Path, answers: Answers, device: int, host: int, nvme: int, streams: int, context: int
) -> None:
    longest = min(context, (device + host + nvme) * PAGE)
    wanted = asks(longest, streams)
    right = answers.of(wanted)
    with Live(model, cache_dir, device=device, host=host, nvme=nvme, context=context, max_streams=8) as live:
        for when in ("cold", "again"):
            found = live.run(wanted)
            for number, ((tokens, end), known) in enumerate(zip(found, right, strict=True)):
                assert end.ev == "done", (when, number, end)
                assert tokens == known, (when, number)
                usage, timings = end.data["usage"], end.data["timings"]
                hits = timings.hit_device + timings.hit_host + timings.hit_nvme
                assert hits == usage.cached_tokens == usage.prompt_tokens - timings.recomputed
            assert live.engine.loop.call(live.engine.pager.check).result(20.0) == []
        live.flush()
        stats = live.engine.loop.call(live.engine.pager.statistics).result(20.0)
        assert stats.device.balanced and stats.host.balanced and stats.nvme.balanced and not stats.leases
        assert live.engine.pager.store is None or live.engine.pager.store.check() == []


FEW = [(8, 64, PLENTY, 8), (32, 64, 0, 8)]


@pytest.mark.parametrize(("device", "host", "nvme", "streams"), FEW)
def test_a_few_sizes(
    model: Path, tmp_path: Path, answers: Answers, device: int, host: int, nvme: int, streams: int
) -> None:
    check(model, tmp_path, answers, device, host, nvme, streams, context=1600)


@pytest.mark.long
@pytest.mark.parametrize(("device", "host", "nvme", "streams"), ALL)
def test_every_size(
    model: Path, tmp_path: Path, answers: Answers, device: int, host: int, nvme: int, streams: int
) -> None:
    check(model, tmp_path, answers, device, host, nvme, streams, context=CONTEXT)


@pytest.mark.long
def test_two_thousand_requests_over_64_streams_with_constant_eviction(model: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    systems = [prompt(number, chance.randint(40, 400)) for number in range(6)]
    wanted = []
    for number in range(2000):
        shared = chance.choice(systems)[: chance.randint(20, 400)]
        own = [chance.randrange(300) for _ in range(chance.randint(1, 60))]
        wanted.append({"tokens": shared + own, "max_tokens": chance.randint(1, 12), "tenant": str(number % 3)})
    with Live(model, tmp_path / "plain", device=PLENTY, nvme=0, context=CONTEXT, max_streams=64) as live:
        right = [tokens for start in range(0, 2000, 60) for tokens, _ in live.run(wanted[start : start + 60])]
    with Live(model, tmp_path / "tiers", device=96, host=64, nvme=300, context=CONTEXT, max_streams=64) as live:
        found = []
        for start in range(0, 2000, 60):
            found += live.run(wanted[start : start + 60])
        assert live.engine.loop.call(live.engine.pager.check).result(20.0) == []
        stats = live.engine.loop.call(live.engine.pager.statistics).result(20.0)
    assert [end.ev for _, end in found] == ["done"] * 2000
    assert sum(tokens != known for (tokens, _), known in zip(found, right, strict=True)) == 0
    assert stats.device.evictions > 2000 and stats.nvme.evictions > 200
