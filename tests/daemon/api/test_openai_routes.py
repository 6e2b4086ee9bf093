"""OpenAI over HTTP, plain and streamed, against fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from fake_engine import whole_text
from front_harness import set_options, until

from tierd.daemon.api import sse

CHAT = "/v1/chat/completions"
BODY = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
PROMPT = "user:hi\n"


def deltas(events):
    return "".join(c["choices"][0]["delta"]["content"] for c in events if c != "[DONE]" and c.get("choices"))


async def test_a_plain_answer(http):
    status, body, headers = await http.post(CHAT, BODY)
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": whole_text(PROMPT, 12), "refusal": None}
    assert choice["finish_reason"] == "length" and body["object"] == "chat.completion"
    details = body["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 2, "cache_write_tokens": max(0, body["usage"]["prompt_tokens"] - 2)}
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12
    assert body["timings"]["recomputed"] == 3 and body["model"] == "alpha"


async def test_a_stream_has_the_pieces_that_clients_need(http):
    events = await http.stream(CHAT, BODY)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == chunks[0]["id"] for chunk in chunks)
    assert all(isinstance(chunk["choices"][0]["delta"]["content"], str) for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert deltas(events) == whole_text(PROMPT, 12)
    assert chunks[-1]["timings"]["ttft_ms"] == 1.0


async def test_the_usage_chunk(http):
    events = await http.stream(CHAT, BODY | {"stream_options": {"include_usage": True}})
    last = events[-2]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 and "timings" in last
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert sum("usage" in event for event in events[:-1]) == 1


async def test_completions_from_text_and_from_tokens(http):
    status, body, _ = await http.post("/v1/completions", {"model": "alpha", "prompt": "tell", "temperature": 0})
    assert status == 200 and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == whole_text("tell", 16)
    _, body, _ = await http.post("/v1/completions", {"model": "alpha", "prompt": [5, 6], "temperature": 0})
    assert body["choices"][0]["text"] == whole_text("5 6", 16)
    events = await http.stream("/v1/completions", {"model": "alpha", "prompt": ["tell"], "temperature": 0})
    pieces = [event for event in events if isinstance(event, dict)]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole_text("tell", 16)


async def test_an_engine_killed_in_the_middle_is_not_seen(http):
    body = BODY | {"messages": [{"role": "user", "content": "!crash=6"}]}
    assert deltas(await http.stream(CHAT, body)) == whole_text("user:!crash=6\n", 12)


async def test_kill_while_streaming(http):
    set_options(http.front.settings.models_dir / "alpha", token_s=0.01)
    stream = asyncio.create_task(http.stream(CHAT, BODY | {"max_tokens": 40}))
    await until(lambda: any(s.live.tokens for s in http.front.service._places))
    os.kill(http.front.engine().pid, signal.SIGKILL)
    assert deltas(await stream) == whole_text(PROMPT, 40)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_is_a_status(http, stream):
    body = BODY | {"messages": [{"role": "user", "content": "!refuse"}], "stream": stream}
    status, answer, headers = await http.post(CHAT, body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["type"] == "invalid_request_error" and headers["x-should-retry"] == "false"


async def test_a_failure_in_the_middle_of_a_stream_is_an_event(http, monkeypatch):
    body = BODY | {"messages": [{"role": "user", "content": "!always=0"}]}
    events = await http.stream(CHAT, body)
    assert events[-1]["error"]["code"] == "engine_failed" and "choices" not in events[-1]
    assert "[DONE]" not in events
    text = str(events[-1])
    assert "Traceback" not in text and "/home" not in text


async def test_an_engine_that_does_not_start_is_told(http):
    fail = {"code": "invalid_model", "message": "weights are short"}
    set_options(http.front.settings.models_dir / "alpha", fail=fail)
    status, answer, headers = await http.post(CHAT, BODY)
    assert status == 422 and answer["error"]["message"] == "weights are short"
    assert headers["x-should-retry"] == "false"


async def test_an_engine_that_exits_leaves_no_internals(http):
    set_options(http.front.settings.models_dir / "alpha", exit=3)
    status, answer, _ = await http.post(CHAT, BODY)
    assert status == 500 and "exit code 3" in answer["error"]["message"]
    assert "/home" not in str(answer) and "0xdead" not in str(answer)


async def test_lists_and_health_answer_at_once_while_a_model_loads(http):
    set_options(http.front.settings.models_dir / "alpha", start_s=60.0)
    waiting = asyncio.create_task(http.post(CHAT, BODY))
    await until(lambda: http.front.service.state == "loading")
    for path in ("/v1/models", "/health", "/metrics"):
        assert (await http.get(path))[0] == 200
    assert (await http.get("/health"))[1]["state"] == "loading"  # it was not waited for
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("n", [65, 1 << 20, (1 << 63) - 1, 1 << 63])
@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_made_for_answers_that_are_too_many(http, n, stream):
    async with asyncio.timeout(5):  # a list of so many would take for ever, or all of the memory
        status, body, _ = await http.post(CHAT, BODY | {"n": n, "stream": stream})
        assert status == 400 and body["error"]["param"] == "n"
        asked = {"model": "alpha", "prompt": "x", "n": n, "stream": stream}
        status, body, _ = await http.post("/v1/completions", asked)
        assert status == 400 and body["error"]["param"] == "n"


async def test_models_and_root(http):
    _, body, _ = await http.get("/v1/models")
    assert [model["id"] for model in body["data"]] == ["alpha", "beta"] and body["object"] == "list"
    assert (await http.get("/v1/models/alpha"))[1]["context_length"] == 4096
    status, body, _ = await http.get("/v1/models/gamma")
    assert status == 404 and body["error"]["code"] == "model_not_found" and "alpha" in body["error"]["message"]
    assert (await http.get("/"))[0] == 200


async def test_draining(http):
    http.front.service.draining = True
    status, body, _ = await http.get("/health")
    assert status == 503 and body["state"] == "draining"
    status, body, headers = await http.post(CHAT, BODY)
    assert status == 503 and headers["Retry-After"] and "x-should-retry" not in headers


async def test_pings_while_a_stream_waits(http, monkeypatch):
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.1)
    monkeypatch.setattr(sse, "PING_S", 0.1)
    set_options(http.front.settings.models_dir / "alpha", start_s=0.6, token_s=0.15)
    events = await http.stream(CHAT, BODY | {"max_tokens": 3})
    assert events.count(": ping") >= 3
    assert deltas([event for event in events if event != ": ping"]) == whole_text(PROMPT, 3)


async def test_a_refusal_after_the_headers_is_an_event(http, monkeypatch):
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.05)
    set_options(http.front.settings.models_dir / "alpha", start_s=0.4)
    events = await http.stream(CHAT, BODY | {"messages": [{"role": "user", "content": "!refuse"}]})
    assert events[-1]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_gone_stops_its_generation(http, stream):
    set_options(http.front.settings.models_dir / "alpha", token_s=0.01)
    task = asyncio.create_task(http.post(CHAT, BODY | {"max_tokens": 4000, "stream": stream}))
    await until(lambda: any(s.live.tokens for s in http.front.service._places))
    task.cancel()
    await until(lambda: http.front.service.live == 0, 1.0)
    assert http.front.engine().streams == 0
    assert (await http.front.service.status())["engines"][0]["cancelled"] == 1


async def test_a_reader_that_stands_still_is_cut(http, monkeypatch):
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.3)
    set_options(http.front.settings.models_dir / "alpha", token_s=0.002)
    body = BODY | {"messages": [{"role": "user", "content": "!big=8000"}], "max_tokens": 4000, "stream": True}
    response = await http.session.post(http.url + CHAT, json=body)
    await until(lambda: http.front.service.live == 0)
    assert http.front.engine().streams == 0
    response.close()


async def test_100_streams_at_once(http):
    bodies = [BODY | {"messages": [{"role": "user", "content": f"c{n}"}]} for n in range(100)]
    answers = await asyncio.gather(*(http.stream(CHAT, body) for body in bodies))
    assert [deltas(events) for events in answers] == [whole_text(f"user:c{n}\n", 12) for n in range(100)]


async def test_metrics_count(http):
    await http.post(CHAT, BODY)
    await http.post(CHAT, BODY | {"messages": [{"role": "user", "content": "!refuse"}]})
    _, text, headers = await http.get("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in ('tierd_requests_total{door="http",outcome="done"} 1', "tierd_completion_tokens_total 12",
                 'tierd_requests_total{door="http",outcome="refused"} 1', "tierd_cached_tokens_total 2",
                 'tierd_tier{model="alpha",tier="device",state="used_pages"} 3',
                 "tierd_time_to_first_token_seconds_count 1", 'tierd_engine_up{model="alpha"} 1'):  # fmt: skip
        assert line in text.splitlines(), line


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


async def test_tool_calls_whole_and_streamed_are_the_same(http):
    body = BODY | {"messages": [{"role": "user", "content": "!calls=2 !think=3"}], "tools": TOOLS}
    _, answer, _ = await http.post(CHAT, body)
    choice = answer["choices"][0]
    whole = [(call["id"], call["function"]["name"], call["function"]["arguments"])
             for call in choice["message"]["tool_calls"]]  # fmt: skip
    assert whole == [(f"call_{n}", "look", '{"x": 7}') for n in range(2)] and choice["finish_reason"] == "tool_calls"
    events = [event for event in await http.stream(CHAT, body) if event != "[DONE]"]
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    said = {call["index"]: [call["id"], call["function"]["name"], ""] for call in calls if "id" in call}
    for call in calls:
        said[call["index"]][2] += call["function"]["arguments"]
    assert [tuple(one) for _, one in sorted(said.items())] == whole
    thinking = "".join(event["choices"][0]["delta"].get("reasoning_content", "") for event in events)
    assert thinking == choice["message"]["reasoning_content"] != ""
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_a_turn_with_the_answer_of_a_tool(http):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c", "content": "seen"}]  # fmt: skip
    status, body, _ = await http.post(CHAT, BODY | {"messages": turns, "tools": TOOLS})
    assert status == 200 and body["choices"][0]["message"]["content"]
    turns[2]["tool_call_id"] = "d"
    status, body, _ = await http.post(CHAT, BODY | {"messages": turns, "tools": TOOLS})
    assert status == 400 and body["error"]["param"] == "messages[2].tool_call_id"


async def test_several_answers_to_several_prompts(http):
    body = {"model": "alpha", "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 0.5, "seed": 1}
    _, answer, _ = await http.post("/v1/completions", body)
    texts = [whole_text(prompt, 3, seed) for prompt in "ab" for seed in (1, 2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 12
    events = await http.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    events = [event for event in events if event != ": ping"]
    assert events[-1] == "[DONE]" and events[-2]["usage"] == answer["usage"] and events[-2]["choices"] == []
    said = dict.fromkeys(range(4), "")
    for event in events[:-2]:
        said[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(said.values()) == texts
    ends = [event["choices"][0]["index"] for event in events[:-2] if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "tools": TOOLS, "tool_choice": "required"}])
async def test_the_recorded_sequence_of_several_streamed_answers(http, fields):
    events = await http.stream(CHAT, BODY | fields)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    for index in range(3):
        mine = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] is None for choice in mine] == [True] * (len(mine) - 1) + [False]


async def test_json_and_logprobs(http):
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    _, body, _ = await http.post(CHAT, BODY | {"response_format": form, "logprobs": True, "top_logprobs": 2})
    choice = body["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"name": "page", "age": 7} and choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 65}, "n"), ({"n": 0}, "n"), ({"n": 3, "best_of": 2}, "best_of"), ({"top_logprobs": 21}, "logprobs"),
        ({"tools": TOOLS * 2}, "tools"), ({"tools": TOOLS * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"cache_salt": "x" * 257}, "salt"), ({"max_tokens": 0}, "max_tokens"),
        ({"guided_regex": ""}, "format.source"),
    ],
)  # fmt: skip
async def test_values_beyond_their_limits(http, fields, param):
    status, body, _ = await http.post(CHAT, BODY | {"logprobs": True} | fields)
    assert status == 400 and body["error"]["param"] == param
