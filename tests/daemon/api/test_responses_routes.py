"""/v1/responses over HTTP, against fake engines."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import whole_text
from front_harness import set_options, until

PATH = "/v1/responses"
BODY = {"model": "alpha", "input": "hi", "max_output_tokens": 6, "temperature": 0}
TEXT = whole_text("user:hi\n", 6)


def parsed(text):
    """Names and payloads of events with a name."""
    out = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        out.append(payload)
    return out


async def stream(http, **fields):
    async with http.session.post(http.url + PATH, json=BODY | fields | {"stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return parsed(await response.text())


def output_text(response):
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def test_a_plain_response(http):
    status, body, _ = await http.post(PATH, BODY)
    assert status == 200 and body["object"] == "response" and output_text(body) == TEXT
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 2 and body["timings"]["recomputed"] == 3


async def test_a_stream_ends_once_and_is_the_plain_response(http):
    events = await stream(http)
    ends = [e["type"] for e in events if e["type"] in ("response.completed", "response.incomplete", "response.failed")]
    assert ends == ["response.incomplete"] == [events[-1]["type"]]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == TEXT
    assert output_text(events[-1]["response"]) == TEXT


async def test_going_on_from_a_response(http):
    _, first, _ = await http.post(PATH, BODY | {"instructions": "Be brief."})
    body = BODY | {"previous_response_id": first["id"], "input": "more"}
    _, second, _ = await http.post(PATH, body)
    assert output_text(second) == whole_text(f"user:hi\nassistant:{output_text(first)}\nuser:more\n", 6)
    events = await stream(http, previous_response_id=second["id"], input="again")
    said = f"user:hi\nassistant:{output_text(first)}\nuser:more\nassistant:{output_text(second)}\nuser:again\n"
    assert output_text(events[-1]["response"]) == whole_text(said, 6)


async def test_a_response_is_kept_shown_and_forgotten(http):
    _, first, _ = await http.post(PATH, BODY)
    url = f"{PATH}/{first['id']}"
    assert (await http.get(url))[1] == first
    async with http.session.delete(http.url + url) as response:
        assert await response.json() == {"id": first["id"], "object": "response", "deleted": True}
    status, body, headers = await http.get(url)
    assert status == 404 and body["error"]["code"] == "not_found" and headers["x-should-retry"] == "false"
    status, body, _ = await http.post(PATH, BODY | {"previous_response_id": first["id"]})
    assert status == 404 and body["error"]["param"] == "previous_response_id"


async def test_what_is_not_stored_is_not_there(http):
    _, first, _ = await http.post(PATH, BODY | {"store": False})
    assert (await http.get(f"{PATH}/{first['id']}"))[0] == 404


async def test_a_call_and_its_answer(http):
    tools = [{"type": "function", "name": "look", "parameters": {"properties": {"where": {"type": "string"}}}}]
    body = BODY | {"tools": tools, "tool_choice": "required"}
    _, first, _ = await http.post(PATH, body)
    (call,) = first["output"]
    assert call["type"] == "function_call" and json.loads(call["arguments"]) == {"where": "page"}
    assert first["status"] == "completed"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a page"}
    status, second, _ = await http.post(PATH, body | {"previous_response_id": first["id"], "input": [output],
                                                      "tool_choice": "auto"})  # fmt: skip
    assert status == 200 and output_text(second)
    orphan = BODY | {"input": [{**output, "call_id": "nobody"}]}
    status, body, _ = await http.post(PATH, orphan)
    assert status == 400 and body["error"]["param"] == "messages[0].tool_call_id"


async def test_tools_that_are_left_out_are_told(http):
    body = BODY | {"tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]}
    status, answer, headers = await http.post(PATH, body)
    assert status == 200 and headers["x-tierd-tools-left-out"] == "custom,web_search" and answer["tools"] == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_is_a_status(http, streamed):
    status, body, headers = await http.post(PATH, BODY | {"input": "!refuse", "stream": streamed})
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert headers["x-should-retry"] == "false"


@pytest.mark.long  # three engines have to die for it
async def test_a_failure_in_the_middle_is_the_one_end(http):
    events = await stream(http, input="!always=0")
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "engine_failed"
    assert sum(event["type"] in ("response.completed", "response.failed") for event in events) == 1
    assert (await http.get(f"{PATH}/{events[-1]['response']['id']}"))[0] == 404


async def test_an_engine_killed_in_the_middle_is_not_seen(http):
    events = await stream(http, input="!crash=3")
    assert output_text(events[-1]["response"]) == whole_text("user:!crash=3\n", 6)


async def test_a_client_that_is_gone_stops_its_generation(http):
    set_options(http.front.settings.models_dir / "alpha", token_s=0.01)
    task = asyncio.create_task(http.post(PATH, BODY | {"max_output_tokens": 4000, "stream": True}))
    await until(lambda: any(s.live.tokens for s in http.front.service._places))
    task.cancel()
    await until(lambda: http.front.service.live == 0)
    assert http.front.engine().streams == 0
