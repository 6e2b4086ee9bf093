"""Chosen pages through a whole engine with real kernels: the tokens are the same wherever the pages were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.counts import counted
from tests.daemon.engine.exact_prompts import check_exact_after, check_streamed_weights
from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.test_bounded_live import prompt, said

CONTEXT, BEGIN, ANSWER = 256, 130, 30

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama", max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("selecting"))


def asks() -> list[dict[str, Any]]:
    """Few pages, more, all, and no mode, from one beginning."""
    begin = prompt(1, BEGIN)
    modes = ("select=4", "select=6", "select=20", None)
    return [
        {"tokens": begin + prompt(number + 2, 9), "max_tokens": ANSWER} | ({"kv_mode": mode} if mode else {})
        for number, mode in enumerate(modes)
    ]


def test_cold_restored_picked_from_the_disk_and_in_company(model: Path, tmp_path: Path) -> None:
    """An engine with plenty of memory, one request after the other, is right."""
    wanted = asks()
    with Live(model, tmp_path / "store", device=100, nvme=200) as live:
        right = [said(live, [ask])[0] for ask in wanted]
        assert right[2] == said(live, [wanted[2] | {"kv_mode": None}])[0], "all pages"
        resumed = wanted[0] | {"resume": tuple(right[0][:19])}
        assert said(live, [resumed])[0] == right[0][19:]
        assert said(live, wanted) == right
        live.flush()
    with Live(model, tmp_path / "store", device=6, nvme=200, max_streams=2, max_batch_rows=24) as live:
        ((tokens, end),) = live.run(wanted[:1])
        assert tokens == right[0] and end.data["timings"].hit_nvme >= 96
        assert live.engine.loop._streams.streaming["picked_bytes"] > 0


@pytest.mark.long
def test_weights_that_are_streamed_change_nothing(tmp_path: Path) -> None:
    check_streamed_weights(tmp_path, asks()[:1], CONTEXT)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(counted(12, 4)))
def test_after_an_answer_an_exact_request_has_what_a_cold_one_has(model: Path, tmp_path: Path, seed: int) -> None:
    ask = {"max_tokens": random.Random(seed).randint(20, 40), "kv_mode": "select=4"}
    check_exact_after(model, tmp_path, seed, ask, (90, 150), lambda length: length)
