"""The `ollama` package against a running daemon."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import ollama
import pytest
from fake_engine import numbers, whole_text
from sdk_daemon import Served, served

PROMPT = "user:hi\n"
HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("ollama"))


@pytest.fixture
def client(daemon: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=daemon.url) as client:
        yield client


def weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return city


def test_an_answer_plain_and_streamed(client):
    plain = client.chat("alpha", HI, options=OPTIONS)
    assert plain.message.content == whole_text(PROMPT, 12) and plain.done_reason == "length"
    parts = list(client.chat("alpha:latest", HI, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == plain.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12 and parts[-1].total_duration > 0 and plain.prompt_eval_count == 1


def test_a_prompt_and_its_context(client):
    first = client.generate("alpha", "hi", options=OPTIONS)
    second = client.generate("alpha", "more", context=first.context, options=OPTIONS, stream=True)
    assert first.response == whole_text(PROMPT, 12) and len(list(second)[-1].context) == len(first.context) + 13


def test_tools_and_their_results(client):
    ask = [{"role": "user", "content": "!calls=2 !think=1"}]
    answer = client.chat("alpha", ask, tools=[weather], think=True, options=OPTIONS).message
    assert [call.function.name for call in answer.tool_calls] == ["weather", "weather"] and answer.thinking
    assert all(set(call.function.arguments) == {"city"} for call in answer.tool_calls)
    results = [{"role": "tool", "tool_name": "weather", "content": str(n)} for n in range(2)]
    told = client.chat("alpha", [*ask, answer, *results, *HI], options=OPTIONS)
    assert told.done and told.message.content


def test_structured_output(client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert set(json.loads(client.chat("alpha", HI, format=schema, options=OPTIONS).message.content)) == {"a"}
    assert json.loads(client.chat("alpha", HI, format="json", options=OPTIONS).message.content) == {}


def test_errors(client):
    with pytest.raises(ollama.ResponseError, match="prepared") as caught:
        client.chat("nothing", HI)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat") as caught:
        client.chat("alpha", HI, options={"mirostat": 1})
    assert caught.value.status_code == 400
    stream = client.chat("beta", [{"role": "user", "content": "!always=1"}], stream=True)
    with pytest.raises(ollama.ResponseError, match="died 3 times"):
        list(stream)
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed("alpha", "text", dimensions=99)


def test_embeddings(client):
    found = client.embed("alpha:latest", ["a b", "c"], truncate=False, keep_alive="5m")
    assert [list(one) for one in found.embeddings] == [numbers("a b"), numbers("c")]
    assert found.prompt_eval_count == 3 and found.model == "alpha:latest"
    assert list(client.embeddings("alpha", "a b").embedding) == numbers("a b")
    assert len(client.embed("alpha", "a b", dimensions=2).embeddings[0]) == 2


def test_models(client):
    assert [model.model for model in client.list().models] == ["alpha:latest", "beta:latest"]
    shown = client.show("alpha")
    assert shown.modelinfo["llama.context_length"] == 4096 and shown.capabilities == ["completion"]
    client.generate("alpha", "", keep_alive=-1)
    (running,) = client.ps().models
    assert running.model == "alpha:latest" and running.expires_at.year > 2100 and running.context_length == 4096
    client.generate("alpha", "", keep_alive=0)
    deadline_s = time.monotonic() + 10
    while client.ps().models:
        assert time.monotonic() < deadline_s


def test_a_client_that_gives_up_ends_its_generation(daemon):
    with ollama.Client(host=daemon.url, timeout=0.3) as client, pytest.raises(Exception, match="timed out"):
        client.chat("alpha", [{"role": "user", "content": "!hang"}])
    deadline_s = time.monotonic() + 10
    while daemon.live():
        assert time.monotonic() < deadline_s


async def test_async(daemon):
    async with ollama.AsyncClient(host=daemon.url) as client:
        parts = [part async for part in await client.chat("alpha", HI, options=OPTIONS, stream=True)]
        assert "".join(part.message.content for part in parts) == whole_text(PROMPT, 12)
        assert (await client.generate("alpha", "hi", options=OPTIONS)).response == whole_text(PROMPT, 12)
        with pytest.raises(ollama.ResponseError, match="prepared"):
            await client.show("nothing")


def test_many_threads_at_once(client):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.chat("alpha", HI, options=OPTIONS).message.content))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [whole_text(PROMPT, 12)] * 8
