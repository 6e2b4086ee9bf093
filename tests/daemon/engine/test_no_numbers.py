"""Keys and values that are no numbers: the request fails, they are forgotten in all tiers, the next one is right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import TOKENIZER, WEIGHTS

TEXT = [(11 * place) % 300 for place in range(70)]
ASK: dict[str, Any] = {"tokens": TEXT, "max_tokens": 6}
BRANCH: dict[str, Any] = {"tokens": [*TEXT[:40], 5, 6, 7], "max_tokens": 6}
SHORT: dict[str, Any] = {"tokens": TEXT[:9], "max_tokens": 6}

pytestmark = [pytest.mark.usefixtures("no_files_left"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("numbers") / "model")


def spoil(live: Live) -> None:
    """Every page of the device holds what is no number, as if the model had computed it."""
    arena = live.engine.pager.device
    size = live.engine.pager.device.record_bytes

    def fill() -> None:
        for slot in range(arena.slots):
            arena.row(slot)[: size - size % 4] = np.full(size // 4, np.nan, np.float32).view(np.uint8)

    live.engine.loop.call(fill).result(10)


def right_in_the_end(live: Live, ask: dict[str, Any]) -> list[int]:
    """Other texts may have copied the beginning of a page: each of them costs one more failure."""
    for _ in range(6):
        ((tokens, end),) = live.run([ask])
        if end.ev == "done":
            return tokens
    raise AssertionError(end)


@pytest.mark.parametrize("first", range(3))
def test_what_is_remembered_of_them_is_forgotten(model: Path, tmp_path: Path, first: int) -> None:
    asks = (ASK, BRANCH, SHORT)
    with Live(model, tmp_path / "right", nvme=0) as live:
        right = [live.run([ask])[0][0] for ask in asks]
    with Live(model, tmp_path / "kv", host=8) as live:
        for ask in asks:
            live.run([ask])
        spoil(live)
        ((_, end),) = live.run([asks[first]])
        assert end.ev == "failed" and end.data["code"] == "engine_failed", end
        assert "not a number" in str(end.data["message"]) and "ask again" in str(end.data["hint"])
        for ask, wanted in zip((asks[first], *asks), (right[first], *right), strict=True):
            assert right_in_the_end(live, ask) == wanted
        assert live.engine.loop.call(live.engine.pager.check).result(10) == []
        live.flush()
    with Live(model, tmp_path / "kv", host=8) as live:
        assert right_in_the_end(live, ASK) == right[0]
        assert live.engine.pager.store is not None and live.engine.pager.store.check() == []


def test_a_request_that_leaves_no_token_forgets_nothing(model: Path, tmp_path: Path) -> None:
    with Live(model, tmp_path / "kv", nvme=0) as live:
        live.run([ASK])
        ((_, end),) = live.run([ASK | {"repetition_penalty": 1e-40}])
        assert end.ev == "failed" and end.data["code"] == "bad_request"
        ((_, end),) = live.run([ASK])
        assert end.ev == "done" and end.data["usage"].cached_tokens == len(TEXT) - 1


def damaged_copy(model: Path, directory: Path, name: str) -> Path:
    """One byte of a file is another one."""
    copy = directory / model.name
    shutil.copytree(model, copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    return copy


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER])
def test_a_model_whose_bytes_have_changed_does_not_start(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelInvalid) as caught, Live(damaged_copy(model, tmp_path, name), tmp_path / "kv"):
        pass
    said = str(caught.value)
    assert "isn't what was imported" in said if name == WEIGHTS else f"{name} differs from its digest" in said
    assert caught.value.hint == "pull it again with --force"
    del caught
