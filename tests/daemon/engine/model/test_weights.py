"""Weights in memory and on the disk: the same tokens in every placement, faults named, memory under its cap."""

from __future__ import annotations

import errno
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.tiers.faults import flip
from tierd.daemon.engine import assemble
from tierd.daemon.engine.model.weights_status import WeightsStatus
from tierd.daemon.engine.scheduler import MIN_PREFILL_ROWS
from tierd.daemon.errors import BadConfig, ModelInvalid
from tierd.daemon.models.catalog import WEIGHTS, load_manifest
from tierd.daemon.models.placement import DoesNotFit, place
from tierd.tiers.store_io import OsIO

pytestmark = pytest.mark.usefixtures("no_files_left")

PROMPTS = [[place % 150 + 20 for place in range(45)], [7, 9, 300, 11]]
ASKS = [{"tokens": prompt, "max_tokens": 7} for prompt in PROMPTS]
ROWS, STREAMS = 64, 4


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers and a table of a thousand rows, which is streamed in several parts."""
    model = reference("llama", num_hidden_layers=6, vocab_size=3000)
    return prepare(model, tmp_path_factory.mktemp("tied"), "int8-g32")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference("llama, dynamic rope, biases", num_hidden_layers=5, vocab_size=3000)
    return prepare(model, tmp_path_factory.mktemp("untied"), "fp32")


def live(model: Path, work: Path, weights_bytes: int | None, **more: Any) -> Live:
    return Live(model, work, nvme=0, weights_bytes=weights_bytes, max_batch_rows=ROWS, max_streams=STREAMS, **more)


def least_bytes(model: Path) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place(load_manifest(model), 1, max(ROWS, STREAMS + MIN_PREFILL_ROWS))
    return caught.value.needed_bytes


def status(running: Live) -> WeightsStatus:
    found: WeightsStatus = running.engine.loop.call(running.engine.weights.statistics).result(10)
    return found


def answers(running: Live) -> list[list[int]]:
    found = running.run(ASKS)
    assert [end.ev for _, end in found] == ["done", "done"], found
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_placement_gives_the_same_tokens(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(name)
    manifest, least = load_manifest(model), least_bytes(model)
    with live(model, tmp_path, None) as running:
        wanted = answers(running)
        assert status(running).nvme_bytes == status(running).read_bytes == 0 and not running.engine.weights.streams
    for memory in (least, (least + manifest.bytes) // 2) if name == "tied" else (least, manifest.bytes - 1):
        with live(model, tmp_path, memory) as running:
            assert answers(running) == wanted
            found = status(running)
            assert found.memory_bytes <= memory and found.retries == found.lost == 0
            assert found.device_bytes + found.nvme_bytes == manifest.bytes
            assert (found.pass_bytes > 0) == (found.ring_bytes > 0) and found.read_bytes > 0
            assert 0 <= found.hits <= found.uses and (found.uses > 0) == (found.pass_bytes > 0)
            assert running.engine.board.latest.weights["nvme_bytes"] == found.nvme_bytes


def test_a_step_of_several_streams_reads_the_weights_once(tied: Path, tmp_path: Path) -> None:
    with live(tied, tmp_path, least_bytes(tied)) as running:
        answers(running)
        totals = running.engine.loop._streams.totals
        steps, read_bytes = totals.steps, status(running).read_bytes
        assert len(answers(running)) == 2
        steps, read_bytes = totals.steps - steps, status(running).read_bytes - read_bytes
        each = status(running).pass_bytes
        assert steps * each * 0.9 < read_bytes < (steps + 1) * each * 1.2  # the prompts' rows of the embedding, too


def test_records_move_while_a_stream_runs(untied: Path, tmp_path: Path) -> None:
    manifest, least = load_manifest(untied), least_bytes(untied)
    with live(untied, tmp_path, None) as running:
        wanted = answers(running)
        weights, loop = running.engine.weights, running.engine.loop
        for memory in (least, manifest.bytes - 1, least, manifest.bytes, (least + manifest.bytes) // 2):
            numbers = [running.submit(**ask) for ask in ASKS]
            loop.call(lambda memory=memory: weights.retarget(memory)).result(10)
            while loop.call(weights.settle).result(10):
                pass
            found = running.collect(*numbers)
            assert [found[number][0] for number in numbers] == wanted
            assert status(running).memory_bytes <= memory and status(running).budget_bytes == memory
        with pytest.raises(DoesNotFit):
            loop.call(lambda: weights.retarget(least - 1)).result(10)
        assert status(running).budget_bytes == (least + manifest.bytes) // 2


@pytest.mark.parametrize("fault", ["gone", "short", "flipped", "unreadable"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weights_that_cannot_be_streamed_stay_where_they_are(
    name: str, fault: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(request.getfixturevalue(name), model)
    path, size = model / WEIGHTS, load_manifest(model).bytes
    with live(model, tmp_path / "work", None) as running:
        wanted, before = answers(running), status(running)
        weights, loop, least = running.engine.weights, running.engine.loop, least_bytes(model)
        faults, whole = Faults(monkeypatch), path.read_bytes()
        fresh = path.with_suffix(".new")  # the running one maps the old
        fresh.write_bytes({"short": whole[:-4096], "flipped": whole[:9] + bytes([whole[9] ^ 4]) + whole[10:]}.get(
            fault, whole))  # fmt: skip
        fresh.rename(path)
        if fault == "gone":
            path.unlink()
        faults.left = 10**6 if fault == "unreadable" else 0
        for _ in range(2):
            with pytest.raises(ModelInvalid):
                loop.call(lambda: weights.retarget(least)).result(10)
            assert answers(running) == wanted and status(running) == before
        faults.left = 0
        path.write_bytes(whole)
        loop.call(lambda: weights.retarget(least)).result(10)
        assert answers(running) == wanted and 0 < status(running).memory_bytes <= least < size


def test_memory_that_cannot_hold_the_model(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_bytes(tied)
    with pytest.raises(BadConfig, match=f"too little for tiny: .* even streamed they need {least} for") as caught:
        with live(tied, tmp_path, least - 1):
            pass
    assert caught.value.param == "weights_mem" and "--weights-mem" in (caught.value.hint or "")
    monkeypatch.setattr(assemble, "total_memory_bytes", lambda: 1000)
    with pytest.raises(BadConfig, match="weights_mem of .* than this machine's memory"), live(tied, tmp_path, 10**9):
        pass


class Faults:
    """Reads of the weights fail while `left` is not used up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        for name in ("preadv", "preadv_batch"):
            monkeypatch.setattr(OsIO, name, self._failing(getattr(OsIO, name)))

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                raise OSError(errno.EIO, "Input/output error")
            return method(*arguments)

        return call


def test_a_disk_error_fails_the_requests_and_nothing_else(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tied, tmp_path, least_bytes(tied)) as running:
        wanted = answers(running)
        faults = Faults(monkeypatch)
        faults.left = 2
        assert answers(running) == wanted and status(running).retries > 0  # the retry hides it
        for _ in range(5):  # more often than an engine forgives steps that it can't explain
            faults.left = 10**6
            ((_, end),) = running.run(ASKS[:1])
            assert end.ev == "failed" and end.data["code"] == "engine_failed"
            assert "can't be read from its disk: weights " in end.data["message"]
        faults.left = 0
        assert answers(running) == wanted
        assert running.deaths == [] and running.engine.pager.check() == []


def test_a_flipped_byte_is_named(tied: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(tied, model)
    record = next(record for record in load_manifest(model).records if record.name == "layer.3")

    with live(model, tmp_path / "work", least_bytes(model)) as running:
        wanted = answers(running)
        flip(model / WEIGHTS, record.offset + record.bytes // 2)
        ((_, end),) = running.run(ASKS[:1])
        assert end.ev == "failed" and "weights layer.3: the bytes on the disk are not" in end.data["message"]
        flip(model / WEIGHTS, record.offset + record.bytes // 2)
        assert answers(running) == wanted
        flip(model / WEIGHTS, record.offset + record.bytes // 2)
        weights, loop = running.engine.weights, running.engine.loop
        loop.call(lambda: weights.retarget(load_manifest(model).bytes)).result(10)
        with pytest.raises(ModelInvalid, match=r"record layer\.3 isn't what was imported"):
            while loop.call(weights.settle).result(10):
                pass
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(ModelInvalid, match="record embed isn't what was imported"):
        with live(model, tmp_path / "work", least_bytes(model)):
            pass


@pytest.mark.model
def test_resident_memory_stays_under_the_cap(model_dir: Path, tmp_path: Path) -> None:
    """The default model, 96 MB, in 24 MB: neither memory nor page cache hold more."""
    manifest, memory = load_manifest(model_dir), 24 << 20
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    ask = {"tokens": [place % 1000 + 5 for place in range(20)], "max_tokens": 4}
    with live(model, tmp_path / "work", None, context=128) as running:
        ((wanted, _),) = running.run([ask])
    subprocess.run(
        ["dd", f"of={model / WEIGHTS}", "oflag=nocache", "conv=notrunc,fdatasync", "count=0"],
        check=True, capture_output=True,
    )  # fmt: skip
    before_bytes = rss_bytes()
    with live(model, tmp_path / "work", memory, context=128) as running:
        ((tokens, end),) = running.run([ask])
        assert end.ev == "done" and tokens == wanted
        found, arena = status(running), running.engine.pager.device
        grown_bytes = rss_bytes() - before_bytes - arena.slots * arena.record_bytes
    assert found.memory_bytes <= memory and found.nvme_bytes > manifest.bytes // 2
    assert grown_bytes < memory + (16 << 20), "scratch, tables and the tokenizer take some, too"
    cached = subprocess.run(["fincore", "-b", "-n", "-o", "RES", str(model / WEIGHTS)], capture_output=True, text=True)
    if cached.returncode == 0:
        assert int(cached.stdout) < manifest.bytes // 10


def rss_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_a_slow_disk_is_waited_for(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tied, tmp_path, least_bytes(tied)) as running:
        wanted = answers(running)
        fast = OsIO.preadv

        def slow(*arguments: Any) -> Any:
            time.sleep(0.01)  # some 20 times what these reads take
            return fast(*arguments)

        monkeypatch.setattr(OsIO, "preadv", slow)
        assert answers(running) == wanted and status(running).waited_s > 0.1
