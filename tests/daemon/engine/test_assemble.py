"""A whole engine on a tiny model: what goes into the names of pages, what cannot be built, what is given back."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tierd.daemon.engine import arenas, assemble
from tierd.daemon.errors import BadConfig
from tierd.tiers.arena import Arena

PROMPT = [place % 150 + 20 for place in range(90)]

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("assemble"))


@pytest.mark.parametrize(("format", "other"), [("fp32", "bf16"), ("k8v4", "k4v8")])
def test_pages_in_every_tier_give_the_same_tokens(tiny: Path, tmp_path: Path, format: str, other: str) -> None:
    ask = {"tokens": PROMPT, "max_tokens": 20}
    with Live(tiny, tmp_path, device=16, host=8, nvme=64, kv_format=format) as live:
        ((cold, end),) = live.run([ask])
        assert end.data["timings"].recomputed == 90
        live.flush()
        live.clear_device()
        ((warm, end),) = live.run([ask])
        timings = end.data["timings"]
        assert warm == cold and timings.hit_host + timings.hit_nvme > 0 and timings.recomputed < 16
        assert live.engine.pager.check() == []
        live.flush()
        first = live.engine.namespace
    with Live(tiny, tmp_path, device=16, host=0, nvme=64, kv_format=format) as live:
        ((again, end),) = live.run([ask])
        assert again == cold and end.data["timings"].hit_nvme >= 80 and live.engine.namespace == first
    with Live(tiny, tmp_path, kv_format=other) as live:
        ((_, end),) = live.run([ask])
        assert end.data["usage"].cached_tokens == 0 and live.engine.namespace != first  # other numbers, other pages


def test_more_streams_than_pages(tiny: Path, tmp_path: Path) -> None:
    prompts = [[number * 9 + place % 40 + 5 for place in range(40)] for number in range(10)]
    asks = [{"tokens": prompt, "max_tokens": 40} for prompt in prompts]
    with Live(tiny, tmp_path, device=64, nvme=0) as live:
        wanted = [live.run([ask])[0][0] for ask in asks]
    with Live(tiny, tmp_path, device=12, host=16, nvme=64, max_streams=6) as live:
        found = live.run(asks)
        assert [tokens for tokens, _ in found] == wanted
        assert live.engine.loop.call(lambda: live.engine.pager.check()).result(5) == []
        assert live.engine.board.latest.running == 0 or live.engine.board.latest.preemptions >= 0


def test_a_seed_says_the_same_whatever_runs_beside_it(tiny: Path, tmp_path: Path) -> None:
    ask = {"tokens": PROMPT[:30], "max_tokens": 30, "temperature": 1.0, "seed": 11, "top_p": 0.95}
    with Live(tiny, tmp_path) as live:
        ((alone, _),) = live.run([ask])
        beside = live.run([{"tokens": PROMPT[:25], "max_tokens": 30, "temperature": 1.0}, ask, ask])
        assert [tokens for tokens, _ in beside[1:]] == [alone, alone]
        ((resumed, _),) = live.run([ask | {"resume": tuple(alone[:13])}])
        assert resumed == alone[13:]


def test_tenants_share_nothing(tiny: Path, tmp_path: Path) -> None:
    with Live(tiny, tmp_path) as live:
        live.run([{"tokens": PROMPT, "max_tokens": 1, "tenant": "a"}])
        ((_, other),) = live.run([{"tokens": PROMPT, "max_tokens": 1, "tenant": "b"}])
        ((_, same),) = live.run([{"tokens": PROMPT, "max_tokens": 1, "tenant": "a"}])
    assert other.data["usage"].cached_tokens == 0 and same.data["usage"].cached_tokens == 89


def test_a_broken_store_directory_turns_the_tier_off(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with Live(tiny, tmp_path / "cache") as live:
        assert any("disk tier is off" in note for note in live.engine.notes)
        ((_, end),) = live.run([{"tokens": PROMPT, "max_tokens": 2}])
        assert end.ev == "done"


def test_a_cache_directory_that_cannot_be_written_is_told_with_what_to_do(tiny: Path) -> None:
    with Live(tiny, Path("/sys/tierd")) as live:  # there nobody makes a directory, whoever runs the tests
        (note,) = live.engine.notes
        assert note.startswith("the disk tier is off: can't use /sys/tierd") and "--cache-dir" in note
        ((_, end),) = live.run([{"tokens": PROMPT, "max_tokens": 2}])
        assert end.ev == "done"


def test_a_disk_too_small_for_the_tier_is_named(tiny: Path, tmp_path: Path) -> None:
    with Live(tiny, tmp_path, nvme=0, nvme_off_reason="the disk is small") as live:
        assert live.engine.notes == ("the disk tier is off: the disk is small",)
    with Live(tiny, tmp_path, nvme=0) as live:
        assert live.engine.notes == ()


def test_what_cannot_be_built(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="holds 0 pages of tiny, it needs 1"), Live(tiny, tmp_path, device=0):
        pass
    with pytest.raises(BadConfig, match="reaches 128"), Live(tiny, tmp_path, context=129):
        pass


@pytest.mark.parametrize(
    ("device", "host", "said", "param"),
    [
        (100, 0, "device_mem of 100 GB is more than this machine's memory of 23.0 GB", "device_mem"),
        (1, 30, "host_mem of 30.0 GB is more than this machine's memory of 23.0 GB", "host_mem"),
        (15, 15, "device_mem of 15.0 GB and host_mem of 15.0 GB are more than this machine's", "device_mem"),
    ],
)
def test_more_memory_than_there_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: int, host: int, said: str, param: str
) -> None:
    monkeypatch.setattr(assemble, "total_memory_bytes", lambda: 23 * 10**9)
    live = Live(tiny, tmp_path, device_bytes=device * 10**9, host_bytes=host * 10**9)
    with pytest.raises(BadConfig, match=said) as caught, live:
        pass
    assert caught.value.param == param and "--" + param.replace("_", "-") in (caught.value.hint or "")


@pytest.mark.parametrize("refused", ["device", "host"])
def test_memory_that_the_system_refuses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def arena(name: str, slots: int, record_bytes: int, **more: Any) -> Arena:
        if name == refused:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Arena(name, slots, record_bytes, **more)

    monkeypatch.setattr(arenas, "Arena", arena)
    with pytest.raises(BadConfig, match=f"refuses .* of memory for {refused}_mem"), Live(tiny, tmp_path, host=8):
        pass
