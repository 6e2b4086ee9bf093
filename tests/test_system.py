"""The whole product: the real model behind the real socket, killed, starved and asked nonsense."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.daemon_home import Home, collect
from tierd.clients.blocking import Client
from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Message, Sampling, Submit

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "smollm2:135m"
PAGE_TOKENS = 16
LONG_TEXT = topics["assignment"] + topics["binary"] + topics["calls"]


@pytest.fixture
def home(tmp_path: Path, models_dir: Path) -> Iterator[Home]:
    """A started daemon with small tiers."""
    daemon = Home(tmp_path, models_dir, device_mem="512MiB", host_mem="256MiB", nvme_mem="2GiB", nvme_min_free="0")
    daemon.start("--model", MODEL)
    yield daemon
    daemon.close()


def long_tokens(models_dir: Path, count: int, skip: int = 0) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models_dir / "smollm2-135m" / "tokenizer.json"))
    return tuple(tokenizer.encode(LONG_TEXT, add_special_tokens=False).ids[skip : skip + count])


def durable(home: Home, pages: int, deadline_s: float = 20.0) -> None:
    """Waits until so many pages are acknowledged durable."""
    until = time.monotonic() + deadline_s
    while home.status()["tiers"]["nvme"]["cached_pages"] < pages:
        assert time.monotonic() < until, home.status()["tiers"]
        time.sleep(0.1)


def test_a_prefix_survives_restart_and_kill(home: Home, models_dir: Path) -> None:
    tokens = long_tokens(models_dir, 1500)
    submit = Submit(model=MODEL, tokens=tokens, sampling=Sampling(temperature=0.0, max_tokens=24))
    cold_text, cold = home.generate(submit)
    assert cold["usage"]["cached_tokens"] == 0
    warm_text, warm = home.generate(submit)
    assert warm_text == cold_text
    assert warm["usage"]["cached_tokens"] == len(tokens) - 1
    full_pages = len(tokens) // PAGE_TOKENS
    durable(home, full_pages)
    home.kill_everything()
    home.start("--model", MODEL)
    killed_text, killed = home.generate(submit)
    assert killed_text == cold_text
    assert killed["usage"]["cached_tokens"] >= full_pages * PAGE_TOKENS
    assert killed["timings"]["hit_nvme"] >= full_pages * PAGE_TOKENS
    assert killed["timings"]["ttft_ms"] <= cold["timings"]["ttft_ms"] / 10
    home.command("stop")
    home.start("--model", MODEL)
    again_text, again = home.generate(submit)
    assert again_text == cold_text
    assert again["usage"]["cached_tokens"] == len(tokens) - 1  # a clean stop keeps the partial tail as well


def test_a_turn_prefills_only_its_new_tokens(home: Home) -> None:
    messages = [Message("system", "You are terse."), Message("user", "Name a colour.")]
    text, first = home.chat(messages)
    before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    messages += [Message("assistant", text), Message("user", "Name another one.")]
    _, second = home.chat(messages)
    new = second["usage"]["prompt_tokens"] - before
    # The last sampled token was never fed back, so its key and value are new too.
    assert second["timings"]["recomputed"] <= new + 2
    assert second["usage"]["cached_tokens"] >= before - 2


def test_a_stream_outlives_its_engine(home: Home) -> None:
    submit = Submit(model=MODEL, prompt="Once upon a time", sampling=Sampling(temperature=0.8, seed=7, max_tokens=320))
    undisturbed, _ = home.generate(submit)
    engine = home.engine_pid()
    with Client(home.socket) as client:
        events = []
        for event in client.generate(submit):
            events.append(event)
            if len(events) == 8:  # long before a fast machine has written it all
                os.kill(engine, signal.SIGKILL)
    text, done = collect(events)
    assert text == undisturbed
    assert done["usage"]["completion_tokens"] == 320
    assert home.engine_pid() != engine


def test_a_working_set_larger_than_the_device_arena(tmp_path: Path, models_dir: Path) -> None:
    page_bytes = 30 * 2 * 3 * PAGE_TOKENS * 64 * 4
    home = Home(tmp_path, models_dir, device_mem=str(80 * page_bytes), host_mem=str(60 * page_bytes),
                nvme_mem=str(800 * page_bytes), nvme_min_free="0")
    home.start("--model", MODEL)
    try:
        # So long that a hiccup of the disk is short beside computing one of them: then waiting for the disk is sooner.
        prompts = [long_tokens(models_dir, 800, skip=800 * i) for i in range(6)]
        assert len(prompts[-1]) == 800
        submits = [
            Submit(model=MODEL, tokens=prompt, sampling=Sampling(temperature=0.0, max_tokens=8)) for prompt in prompts
        ]
        cold = [home.generate(submit) for submit in submits]
        home.generate(submits[0])  # the first load shows how fast the disk is; until then computing goes on beside it
        again = [home.generate(submit) for submit in submits]
        assert [text for text, _ in again] == [text for text, _ in cold]
        cached = [done["usage"]["cached_tokens"] for _, done in again]
        assert min(cached) >= 784, cached
        hits = [done["timings"] for _, done in again]
        assert sum(hit["hit_host"] + hit["hit_nvme"] for hit in hits) > 0
    finally:
        home.close()


def test_eight_streams_give_what_each_gives_alone(home: Home, models_dir: Path) -> None:
    submits = [
        Submit(model=MODEL, tokens=long_tokens(models_dir, 60 + 17 * i, skip=97 * i),
               sampling=Sampling(temperature=0.0, max_tokens=32))
        for i in range(8)
    ]
    together: list[str] = [""] * len(submits)

    def one(index: int) -> None:
        together[index] = home.generate(submits[index])[0]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(submits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    home.command("cache", "clear", "--yes")
    assert together == [home.generate(submit)[0] for submit in submits]


def test_a_client_that_leaves_stops_the_work_and_keeps_the_pages(home: Home, models_dir: Path) -> None:
    submit = Submit(model=MODEL, tokens=long_tokens(models_dir, 200),
                    sampling=Sampling(temperature=0.0, max_tokens=4000, ignore_eos=True))
    with Client(home.socket) as client:
        for received, event in enumerate(client.generate(submit)):
            if event.ev == "text" and received > 10:
                break
    until = time.monotonic() + 5
    while home.status()["engines"][0]["running"]:
        assert time.monotonic() < until, "the engine went on without its client"
        time.sleep(0.05)
    _, done = home.generate(Submit(model=MODEL, tokens=submit.tokens, sampling=Sampling(max_tokens=1)))
    assert done["usage"]["cached_tokens"] == 199


@pytest.mark.parametrize(
    ("submit", "code", "words"),
    [
        (Submit(model=MODEL, prompt="word " * 20000), "context_length_exceeded", "20001"),
        (Submit(model="nobody", prompt="hi"), "model_not_found", "nobody"),
        (Submit(model=MODEL, prompt="hi", sampling=Sampling(max_tokens=0)), "bad_request", "max_tokens"),
        (Submit(model=MODEL, messages=()), "bad_request", "messages"),
    ],
)
def test_bad_requests_are_told_why(shared_home: Home, submit: Submit, code: str, words: str) -> None:
    with Client(shared_home.socket) as client, pytest.raises(TierdError) as caught:
        list(client.generate(submit))
    assert caught.value.code == code
    assert words in str(caught.value)
    assert shared_home.ask("Hello", max_tokens=2)[1]["usage"]["completion_tokens"] >= 1


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[Home]:
    daemon = Home(tmp_path_factory.mktemp("shared"), models_dir, device_mem="256MiB", host_mem="0", nvme_mem="0")
    daemon.start("--model", MODEL)
    yield daemon
    daemon.close()


def test_the_command_line_answers(shared_home: Home) -> None:
    answer = json.loads(shared_home.command("run", "--json", "--max-tokens", "8", MODEL, "What is a page?").stdout)
    assert {"text", "usage", "timings"} <= set(answer)
    assert answer["usage"]["completion_tokens"] <= 8
    expected = {"ttft_ms", "decode_tokens_per_s", "hit_device", "hit_host", "hit_nvme", "recomputed"}
    assert expected <= set(answer["timings"])
    piped = shared_home.command("run", "--max-tokens", "4", MODEL, text="Say yes.")
    assert piped.stdout.strip()
    assert shared_home.command("show", MODEL, "--json").stdout
    begun = time.monotonic()
    shared_home.command("ps")
    assert time.monotonic() - begun < 1.5  # 0.3 s on an idle machine


def test_a_disk_that_fills_up_costs_the_tier_and_nothing_else(tmp_path: Path, models_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "cache"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], check=True)
    home = Home(tmp_path, models_dir, device_mem="256MiB", host_mem="0", nvme_mem="1GiB", nvme_min_free="0")
    try:
        home.start("--model", MODEL)
        submits = [
            Submit(model=MODEL, tokens=long_tokens(models_dir, 500, skip=500 * i), sampling=Sampling(max_tokens=4))
            for i in range(3)
        ]
        for submit in submits:
            home.generate(submit)
        until = time.monotonic() + 10
        while "nvme" not in home.command("status").stdout + home.command("logs").stdout:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert home.generate(submits[2])[1]["usage"]["cached_tokens"] == 499
    finally:
        home.close()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_second_daemon_is_refused(shared_home: Home) -> None:
    second = shared_home.command("serve", check=False)
    assert second.returncode != 0
    assert "already" in second.stderr


def test_without_a_daemon_the_command_line_says_how_to_start_one(tmp_path: Path, models_dir: Path) -> None:
    home = Home(tmp_path, models_dir)
    answer = home.command("ps", check=False)
    assert answer.returncode == 69
    assert "tierd start" in answer.stderr


def test_a_damaged_store_is_a_miss_and_not_a_failure(home: Home, models_dir: Path) -> None:
    tokens = long_tokens(models_dir, 320)
    submit = Submit(model=MODEL, tokens=tokens, sampling=Sampling(temperature=0.0, max_tokens=8))
    text, _ = home.generate(submit)
    durable(home, 20)
    home.command("stop")
    slabs = [path for path in (home.root / "cache").rglob("*") if path.is_file() and "slab" in path.name]
    assert slabs
    with slabs[0].open("r+b") as slab:
        for offset in range(8192, slabs[0].stat().st_size, 1 << 18):
            slab.seek(offset)
            slab.write(b"\xff" * 64)
    home.start("--model", MODEL)
    again, done = home.generate(submit)
    assert again == text
    assert done["usage"]["cached_tokens"] < 320
    home.command("stop")
    shutil.rmtree(home.root / "cache")
    home.start("--model", MODEL)
    assert home.generate(submit)[0] == text
