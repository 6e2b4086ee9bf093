"""Anthropic over HTTP, plain and streamed, against fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from fake_engine import whole_text
from front_harness import set_options, until

from tierd.daemon.api import sse

MESSAGES = "/v1/messages"
PROMPT = "user:hi\n"
STOPS = ("message_stop", "error")


def body(words="hi", **fields):
    turns = [{"role": "user", "content": words}]
    return {"model": "alpha", "max_tokens": 12, "messages": turns, "temperature": 0} | fields


async def stream(http, given, path=MESSAGES):
    """The events of a stream as (name, data)."""
    async with http.session.post(http.url + path, json=given | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return parse((await response.read()).decode())


def parse(text):
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][0] == events[-1][1]["type"]
    return events


def text_of(events):
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


async def test_a_plain_answer(shared):
    status, answer, headers = await shared.post(MESSAGES, body())
    assert status == 200 and answer["content"] == [{"type": "text", "text": whole_text(PROMPT, 12)}]
    assert answer["stop_reason"] == "max_tokens" and answer["model"] == "alpha" and answer["id"].startswith("msg_")
    assert answer["usage"]["cache_read_input_tokens"] == 2 and answer["usage"]["output_tokens"] == 12
    assert headers["request-id"].startswith("req_") and "x-tierd-stripped" not in headers


async def test_a_streamed_answer_is_the_same(shared):
    events = await stream(shared, body())
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"} and text_of(events) == whole_text(PROMPT, 12)
    _, answer, _ = await shared.post(MESSAGES, body())
    assert events[-2][1]["usage"] == answer["usage"]


async def test_the_query_is_no_part_of_the_path(shared):
    given = body(betas=["x"])
    assert (await shared.post(f"{MESSAGES}?beta=true", given, anthropic_beta="new-2026", x_api_key="any"))[0] == 200


async def test_tools_and_thinking_plain_and_streamed(shared):
    tools = [{"name": "measure", "input_schema": {"type": "object"}}]
    given = body("!think=2 !calls=2", tools=tools)
    _, answer, _ = await shared.post(MESSAGES, given)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][2]["input"] == {"number": 0, "unit": "Größe"} and answer["stop_reason"] == "tool_use"
    assert answer["content"][3]["name"] == "measure" and answer["content"][0]["signature"]
    events = await stream(shared, given)
    pieces = [d["delta"]["partial_json"] for n, d in events if "partial_json" in d.get("delta", {})]
    assert json.loads("".join(pieces[:3])) == {"number": 0, "unit": "Größe"} and len(pieces) == 6


async def test_what_the_engine_gets(shared):
    given = body("!echo", system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}])
    _, answer, _ = await shared.post(MESSAGES, given)
    got = json.loads(answer["content"][0]["text"])
    assert got["keep"] == [{"messages": 1, "ttl_s": 300.0}] and got["messages"][0] == {"role": "system", "content": "s"}


async def test_dropped_attribution_is_told_in_a_header(shared):
    given = body("!echo", system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1"}])
    status, answer, headers = await shared.post(MESSAGES, given)
    assert status == 200 and headers["x-tierd-stripped"] == "attribution"
    assert "billing" not in answer["content"][0]["text"]
    async with shared.session.post(shared.url + MESSAGES, json=given | {"stream": True}) as response:
        assert response.headers["x-tierd-stripped"] == "attribution"
        await response.read()


@pytest.mark.parametrize("http", [{"strip_attribution": False}], indirect=True)
async def test_attribution_stays_where_it_is_wanted(http):
    given = body("!echo", system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1"}])
    _, answer, headers = await http.post(MESSAGES, given)
    assert "billing" in answer["content"][0]["text"] and "x-tierd-stripped" not in headers


async def test_max_tokens_beyond_the_context_is_the_context(shared):
    _, answer, _ = await shared.post(MESSAGES, body("!echo !stop", max_tokens=1_000_000))
    assert json.loads(answer["content"][0]["text"])["sampling"]["max_tokens"] == 4096
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == "END"


async def test_the_prompt_alone_is_cached(shared):
    _, answer, _ = await shared.post(MESSAGES, body(max_tokens=0))
    assert answer["content"] == [] and answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 0


async def test_counting_tokens(shared):
    given = {"model": "alpha", "messages": body()["messages"]}
    status, answer, _ = await shared.post("/v1/messages/count_tokens", given)
    assert status == 200 and answer == {"input_tokens": 1}


ERRORS = (
    (body(max_tokens=None), 400, "invalid_request_error"), (body(model="nothing"), 404, "not_found_error"),
    (body("!refuse"), 400, "invalid_request_error"), (body(top_p=7), 400, "invalid_request_error"),
    (body(messages=[{"role": "user", "content": [{"type": "image"}]}]), 400, "invalid_request_error"),
)  # fmt: skip


async def test_errors_have_anthropics_shape(shared):
    for given, status, kind in ERRORS:
        for streamed in (False, True):
            got, answer, headers = await shared.post(MESSAGES, given | {"stream": streamed})
            assert got == status and answer["type"] == "error" and answer["error"]["type"] == kind, answer
            assert answer["request_id"] == headers["request-id"] and headers["x-should-retry"] == "false"


async def test_too_long_a_prompt_is_told_in_the_words_that_clients_know(shared):
    _, answer, _ = await shared.post(MESSAGES, body("!refuse"))
    assert answer["error"]["message"].startswith("prompt is too long: 5000 tokens used")


@pytest.mark.parametrize("http", [{"max_streams": 1, "max_queue": 1}], indirect=True)
async def test_a_full_queue_is_529(http):
    waiting = [asyncio.create_task(http.post(MESSAGES, body(f"!hang {n}"))) for n in range(2)]
    await until(lambda: http.front.service.live == 2)
    status, answer, headers = await http.post(MESSAGES, body())
    assert status == 529 and answer["error"]["type"] == "overloaded_error"
    assert headers["Retry-After"] == "2" and "x-should-retry" not in headers
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("http", [{"api_key": "geheim"}], indirect=True)
async def test_the_key_may_come_as_x_api_key(http):
    assert (await http.post(MESSAGES, body(), x_api_key="geheim"))[0] == 200
    status, answer, _ = await http.post(MESSAGES, body(), x_api_key="falsch")
    assert status == 401 and answer["error"]["type"] == "authentication_error"
    assert (await http.post("/v1/messages/count_tokens", body()))[0] == 401


async def test_models_in_anthropics_shape_for_those_who_speak_it(shared):
    _, answer, _ = await shared.get("/v1/models", anthropic_version="2023-06-01")
    assert [item["id"] for item in answer["data"]] == ["alpha", "beta"] and answer["last_id"] == "beta"
    _, one, _ = await shared.get("/v1/models/alpha", anthropic_version="2023-06-01")
    assert one["type"] == "model" and one["created_at"] == "1970-01-01T00:00:00Z" and one["max_input_tokens"] == 4096
    assert (await shared.get("/v1/models/alpha"))[1]["object"] == "model"


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_an_engine_killed_in_the_middle_is_not_seen(shared):
    events = await stream(shared, body("!crash=6 !think=3 !calls=1"))
    assert [name for name, _ in events if name in STOPS] == ["message_stop"]
    assert sum(name == "message_start" for name, _ in events) == 1
    thinking = [d["delta"]["thinking"] for n, d in events if "thinking" in d.get("delta", {})]
    assert "".join(thinking) + text_of(events) == whole_text("user:!crash=6 !think=3 !calls=1\n", 12)


async def test_a_failure_in_the_middle_is_the_one_end(http):
    events = await stream(http, body("!always=0"))
    assert [name for name, _ in events if name in STOPS] == ["error"] and events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "api_error" and "/home" not in str(events[-1])


async def test_a_stop_of_the_daemon_is_an_end_too(http):
    waiting = asyncio.create_task(stream(http, body("!hang")))
    await until(lambda: any(s.live.accepted for s in http.front.service._places))
    from tierd.daemon.errors import Draining

    http.front.engine().fail_streams(Draining())
    events = await waiting
    assert [name for name, _ in events] == ["message_start", "error"]
    assert events[-1][1]["error"]["type"] == "overloaded_error"


async def test_a_client_that_goes_ends_its_generation(http):
    set_options(http.front.settings.models_dir / "alpha", token_s=0.01)
    async with http.session.post(http.url + MESSAGES, json=body(max_tokens=4000, stream=True)) as response:
        await response.content.readany()
        assert http.front.service.live == 1
    await until(lambda: http.front.service.live == 0)


async def test_pings_while_nothing_comes(http, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.05)
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.05)
    async with http.session.post(http.url + MESSAGES, json=body("!hang", stream=True)) as response:
        seen = b""
        while seen.count(b"event: ping") < 3:
            seen += await response.content.readany()
    await until(lambda: http.front.service.live == 0)


async def test_a_kill_of_the_engine_while_it_streams(http):
    set_options(http.front.settings.models_dir / "alpha", token_s=0.01)
    waiting = asyncio.create_task(stream(http, body(max_tokens=40)))
    await until(lambda: any(s.live.tokens for s in http.front.service._places))
    os.kill(http.front.engine().pid, signal.SIGKILL)
    assert text_of(await waiting) == whole_text(PROMPT, 40)
