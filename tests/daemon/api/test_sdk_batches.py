"""Batches through the `openai` package: uploaded, run, read back, cancelled, and gone on with after a kill -9."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import numbers, whole_text
from front_harness import Daemon, make_model, set_options
from sdk_daemon import Served, served


def line(number: int, text: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "alpha", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def lines(*entries: dict[str, Any]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("batches"), max_streams=4)


@pytest.fixture
def client(daemon: Served) -> Iterator[openai.OpenAI]:
    with connected(daemon.url) as client:
        yield client


def begin(client: openai.OpenAI, content: bytes, endpoint: str = "/v1/chat/completions") -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"who": "me"}
    )


def until(client: openai.OpenAI, batch_id: str, *states: str) -> Any:
    deadline_s = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch_id)).status not in states:
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {entry["custom_id"]: entry for entry in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_batch_from_upload_to_answers(client):
    batch = begin(client, lines(line(1, "hi"), line(2, "!refuse"), line(3, "ho")))
    assert batch.status == "validating" and batch.metadata == {"who": "me"}
    batch = until(client, batch.id, "completed", "failed")
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    answers, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert answers["c1"]["response"]["body"]["choices"][0]["message"]["content"] == whole_text("user:hi\n", 4)
    assert answers["c1"]["response"]["status_code"] == 200 and answers.keys() == {"c1", "c3"}
    assert errors["c2"]["response"]["status_code"] == 400 and errors["c2"]["error"]["code"] == "context_length_exceeded"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.batches.list(limit=1).data[0].id == batch.id
    with pytest.raises(openai.ConflictError, match="completed already"):
        client.batches.cancel(batch.id)


def test_embeddings_and_completions(client):
    asked = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"model": "alpha", "input": f"t {n}"}}
        for n in range(3)
    ]
    batch = until(client, begin(client, lines(*asked), "/v1/embeddings").id, "completed", "failed")
    answers = read(client, batch.output_file_id)
    assert answers["2"]["response"]["body"]["data"][0]["embedding"] == numbers("t 2")
    body = {"model": "alpha", "prompt": ["a", "b"], "max_tokens": 2, "temperature": 0}
    asked = [{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}]
    batch = until(client, begin(client, lines(*asked), "/v1/completions").id, "completed", "failed")
    choices = read(client, batch.output_file_id)["x"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == [whole_text("a", 2), whole_text("b", 2)]


def test_a_file_that_cannot_be_used_fails_the_batch_and_runs_nothing(client):
    bad = lines(line(1, "hi"), line(1, "ho"), line(2, "x", url="/v1/completions"), line(3, "x", method="GET"))
    nobody = line(4, "x")
    nobody["body"]["model"] = "nobody"
    batch = until(client, begin(client, bad + lines(nobody) + b"{\n").id, "completed", "failed")
    assert batch.status == "failed" and batch.output_file_id is None and batch.failed_at
    told = {(fault.line, fault.code) for fault in batch.errors.data}
    assert told == {
        (2, "invalid_line"), (3, "mismatched_url"), (4, "invalid_line"), (5, "model_not_found"), (6, "invalid_line")
    }  # fmt: skip
    batch = until(client, begin(client, b"\n").id, "completed", "failed")
    assert "0 requests" in batch.errors.data[0].message


def test_a_cancelled_batch_keeps_what_is_answered(client, daemon):
    batch = begin(client, lines(line(1, "hi"), *[line(n, "!hang") for n in range(2, 9)]))
    deadline_s = time.monotonic() + 20
    while client.batches.retrieve(batch.id).request_counts.completed < 1:
        assert time.monotonic() < deadline_s
    with pytest.raises(openai.ConflictError, match="reads this file"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = until(client, batch.id, "cancelled")
    assert batch.cancelling_at and batch.cancelled_at and read(client, batch.output_file_id).keys() == {"c1"}
    while daemon.live():
        assert time.monotonic() < deadline_s
    assert client.files.delete(batch.input_file_id).deleted


def test_files(client):
    file = client.files.create(file=("a/../größe.jsonl", b"x"), purpose="batch")
    assert (file.filename, file.bytes, file.status) == ("größe.jsonl", 1, "processed")
    assert client.files.list(purpose="batch", limit=1).data[0].id == file.id
    assert client.files.content(file.id).content == b"x"
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=("a", b"x"), purpose="assistants")
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    assert caught.value.param == "endpoint"


def test_a_batch_goes_on_after_the_daemon_was_killed(daemon_in: Callable[..., tuple[str, Daemon]], tmp_path: Path):
    make_model(tmp_path / "models", "alpha", token_s=0.02)
    one, process = daemon_in()
    count = 40
    with connected(one) as client:
        batch = begin(client, lines(*[line(n, f"text {n}") for n in range(count)]))
        deadline_s = time.monotonic() + 20
        while (done := client.batches.retrieve(batch.id).request_counts.completed) < 3:
            assert time.monotonic() < deadline_s
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.wait(10)
    assert done < count
    (answers,) = [path for path in (tmp_path / "batches").glob("file-*.jsonl") if b"batch_req_" in path.read_bytes()]
    before = [json.loads(text) for text in answers.read_text().splitlines() if text.endswith("}")]
    set_options(tmp_path / "models" / "alpha", token_s=0.0)
    again, _ = daemon_in()
    with connected(again) as client:
        batch = until(client, batch.id, "completed", "failed")
        found = read(client, batch.output_file_id)
    assert batch.request_counts.completed == len(found) == count and batch.request_counts.failed == 0
    for number in range(count):
        body = found[f"c{number}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == whole_text(f"user:text {number}\n", 4)
    assert [found[entry["custom_id"]] for entry in before] == before  # nothing was computed again


@pytest.fixture
def daemon_in(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Daemon]]]:
    """Starts a daemon over the same directories; the address of its HTTP."""
    started: list[Daemon] = []

    def start() -> tuple[str, Daemon]:
        process = Daemon(tmp_path, max_streams=2)
        started.append(process)
        process.wait()
        return Served(tmp_path, process).url, process

    yield start
    for process in started:
        process.end()
