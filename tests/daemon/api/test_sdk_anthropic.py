"""The `anthropic` package against a running daemon. Behind `long`: its import alone takes four seconds of processor."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from fake_engine import whole_text
from sdk_daemon import Served, served

pytestmark = pytest.mark.long

PROMPT = "user:hi\n"
ASK: dict[str, Any] = {
    "model": "alpha", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}],
    "extra_body": {"temperature": 0},  # the package has no argument of this name any more
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "measure", "description": "it", "input_schema": SCHEMA}]


def ask(words, **fields):
    return ASK | {"messages": [{"role": "user", "content": words}]} | fields


@pytest.fixture(scope="module")
def sdk():
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("anthropic"), max_streams=1, max_queue=3)


@pytest.fixture
def client(sdk, daemon: Served):
    with sdk.Anthropic(base_url=daemon.url, api_key="any") as client:
        yield client


def until_idle(daemon):
    deadline_s = time.monotonic() + 10
    while daemon.live():
        assert time.monotonic() < deadline_s


def test_an_answer_plain_and_streamed(client):
    plain = client.messages.create(**ASK)
    assert plain.content[0].text == whole_text(PROMPT, 12) and plain.stop_reason == "max_tokens"
    assert plain._request_id.startswith("req_") and plain.usage.cache_read_input_tokens == 2
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == plain.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == plain.content[0].text and final.usage.output_tokens == 12
    raw = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]


def test_tools_and_their_results(client):
    asked = ask("!calls=2 !think=1", tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    plain = client.messages.create(**asked | {"max_tokens": 12})
    assert [block.type for block in plain.content] == ["thinking", "text", "tool_use", "tool_use"]
    with client.messages.stream(**asked | {"max_tokens": 12}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and set(final.content[2].input) == {"city"}
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in plain.content]
    calls = [block for block in final.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls]
    turns = [*asked["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    told = client.messages.create(**ASK | {"messages": turns, "tools": TOOLS})
    assert told.stop_reason == "max_tokens" and told.content[-1].text


def test_the_beta_client(client):
    told = client.beta.messages.create(**ASK, betas=["prompt-caching-2024-07-31"])
    assert told.content[0].text == whole_text(PROMPT, 12)


def test_structured_output(client):
    class Weather(pydantic.BaseModel):
        city: str
        degrees: int

    assert client.messages.parse(**ASK, output_format=Weather).parsed_output.city
    config = {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}
    told = client.messages.create(**ASK, output_config=config)
    assert set(json.loads(told.content[0].text)) == {"city", "degrees"}


def test_counting_tokens(client):
    assert client.messages.count_tokens(model="alpha", messages=ASK["messages"]).input_tokens == 1


def test_models(client):
    assert [model.id for model in client.models.list(limit=1000)] == ["alpha", "beta"]
    assert client.models.retrieve("alpha").type == "model"


def test_errors(sdk, client):
    with pytest.raises(sdk.NotFoundError, match="prepared"):
        client.messages.create(**ASK | {"model": "nothing"})
    with pytest.raises(sdk.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask("!refuse"))
    with pytest.raises(sdk.BadRequestError, match="image"):
        picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [picture]}]})
    with pytest.raises(sdk.APIStatusError, match="died 3 times"):
        with client.messages.stream(**ask("!always=1", model="beta")) as stream:
            stream.get_final_message()


def test_a_client_that_gives_up_ends_its_generation(sdk, client, daemon):
    with pytest.raises(sdk.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).messages.create(**ask("!hang"))
    until_idle(daemon)


def test_a_full_queue_is_tried_again(sdk, daemon, client):
    closed = threading.Event()

    def hang():
        with client.messages.create(**ask("!hang", stream=True)) as stream:
            next(iter(stream))
            closed.wait(30)

    threads = [threading.Thread(target=hang) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 10
    while daemon.live() < 4:
        assert time.monotonic() < deadline_s
    with pytest.raises(sdk.APIStatusError) as caught:
        client.with_options(max_retries=0).messages.create(**ASK)
    assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"
    threading.Timer(0.5, closed.set).start()
    assert client.messages.create(**ASK).content[0].text == whole_text(PROMPT, 12)
    for thread in threads:
        thread.join()
    until_idle(daemon)


async def test_async(sdk, daemon):
    async with sdk.AsyncAnthropic(base_url=daemon.url, api_key="any") as client:
        assert (await client.messages.create(**ASK)).content[0].text == whole_text(PROMPT, 12)
        async with client.messages.stream(**ASK) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole_text(PROMPT, 12)
        with pytest.raises(sdk.NotFoundError):
            await client.messages.create(**ASK | {"model": "nothing"})
