"""Ollama over HTTP, plain and streamed, against fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import datetime

import pytest
from fake_engine import whole_text
from front_harness import make_model, set_options, until

from tierd.daemon import keys, puller
from tierd.daemon.api import ollama_routes, sse

CHAT, GENERATE = "/api/chat", "/api/generate"
PROMPT = "user:hi\n"


def chat(words="hi", options=None, **fields):
    options = {"temperature": 0, "num_predict": 12} | (options or {})
    return {"model": "alpha", "messages": [{"role": "user", "content": words}], "options": options} | fields


async def stream(http, path, given):
    async with http.session.post(http.url + path, json=given) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in (await response.read()).splitlines()]


def ends(lines):
    return [place for place, line in enumerate(lines) if line.get("done") or "error" in line]


async def test_a_stream_is_what_is_given_without_being_asked(shared):
    lines = await stream(shared, CHAT, chat())
    assert "".join(line["message"]["content"] for line in lines) == whole_text(PROMPT, 12)
    assert ends(lines) == [len(lines) - 1] and lines[-1]["done_reason"] == "length"
    assert lines[-1]["eval_count"] == 12 and lines[-1]["tierd"]["cached_tokens"] == 2


async def test_a_plain_answer_is_the_same(shared):
    status, answer, headers = await shared.post(CHAT, chat(stream=False))
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert answer["message"] == {"role": "assistant", "content": whole_text(PROMPT, 12)} and answer["done"]


async def test_tools_and_thinking_plain_and_streamed(shared):
    tools = [{"type": "function", "function": {"name": "measure", "parameters": {"type": "object"}}}]
    given = chat("!think=2 !calls=2", tools=tools, think=True)
    _, answer, _ = await shared.post(CHAT, given | {"stream": False})
    first, second = answer["message"]["tool_calls"]
    assert first["function"] == {"index": 0, "name": "measure", "arguments": {"number": 0, "unit": "Größe"}}
    assert second["function"]["arguments"]["number"] == 1 and answer["message"]["thinking"]
    lines = await stream(shared, CHAT, given)
    assert [len(line["message"]["tool_calls"]) for line in lines if "tool_calls" in line["message"]] == [1, 1]
    assert "".join(line["message"].get("thinking", "") for line in lines) == answer["message"]["thinking"]


async def test_a_prompt_and_its_context(shared):
    lines = await stream(shared, GENERATE, {"model": "alpha", "prompt": "hi", "options": {"num_predict": 3}})
    context = lines[-1]["context"]
    assert len(context) == 1 + 3  # the fake engine counts every prompt as one token
    given = {"model": "alpha", "prompt": "!echo", "context": context, "stream": False, "options": {"num_predict": 1}}
    _, answer, _ = await shared.post(GENERATE, given)
    assert answer["context"][:4] == context and len(answer["context"]) == 6


async def test_a_raw_prompt_is_taken_as_it_is(shared):
    given = {"model": "alpha", "prompt": "!echo", "raw": True, "stream": False}
    _, answer, _ = await shared.post(GENERATE, given)
    assert json.loads(answer["response"])["prompt"] == "!echo" and "context" not in answer


async def test_a_context_goes_with_thinking(shared):
    given = {"model": "alpha", "prompt": "!think=2", "context": [7, 8], "think": True, "options": {"num_predict": 4}}
    _, whole, _ = await shared.post(GENERATE, given | {"stream": False})
    lines = await stream(shared, GENERATE, given)
    assert whole["thinking"] and whole["response"] and whole["context"][:2] == lines[-1]["context"][:2] == [7, 8]
    assert "".join(line.get("thinking", "") for line in lines) == whole["thinking"]
    echo = {"model": "alpha", "prompt": "!echo", "context": [7, 8], "think": False, "stream": False,
            "options": {"num_predict": 1}}  # fmt: skip
    sent = json.loads((await shared.post(GENERATE, echo))[1]["response"])
    assert sent["before"] == [7, 8] and sent["thinking"] is False and sent["messages"][0]["content"] == "!echo"


async def test_bounds_beyond_the_context_are_the_context(shared):
    _, answer, _ = await shared.post(CHAT, chat("!echo !stop", {"num_predict": 10**6, "num_ctx": 10**6}, stream=False))
    got = json.loads(answer["message"]["content"])
    assert got["sampling"]["max_tokens"] == 4096 and "ctx" not in got


async def test_logprobs(shared):
    _, answer, _ = await shared.post(CHAT, chat(stream=False, logprobs=True, top_logprobs=2))
    assert len(answer["logprobs"]) == 12 and len(answer["logprobs"][0]["top_logprobs"]) == 2


ERRORS = (
    (CHAT, chat(model="nothing"), 404), (CHAT, chat(options={"mirostat": 2}), 400), (CHAT, chat("!refuse"), 400),
    (GENERATE, {"model": "alpha", "prompt": "x", "template": "y"}, 400), (CHAT, {}, 400),
    ("/api/show", {"model": "nothing"}, 404), ("/api/show", {}, 400), ("/api/embed", {}, 400),
    ("/api/embeddings", {}, 400), ("/api/nothing", {}, 404), ("/api/pull", {"model": "../x"}, 400),
    ("/api/pull", {"model": "x", "insecure": True}, 400), ("/api/pull", {"model": "file.gguf"}, 400),
    ("/api/pull", {"model": "x", "username": "me"}, 400), ("/api/show", {"model": "alpha", "template": "x"}, 400),
)  # fmt: skip


async def test_errors_are_one_sentence(shared):
    for path, given, status in ERRORS:
        got, answer, _ = await shared.post(path, given)
        assert got == status and list(answer) == ["error"] and isinstance(answer["error"], str), (path, given)


# -- models ------------------------------------------------------------------------------------------------------------


async def test_lists(http):
    status, answer, _ = await http.get("/api/tags")
    assert status == 200 and [item["model"] for item in answer["models"]] == ["alpha:latest", "beta:latest"]
    _, shown, _ = await http.post("/api/show", {"name": "alpha:latest", "verbose": True})
    assert shown["model_info"]["llama.context_length"] == 4096
    assert shown["parameters"].split()[:2] == ["num_ctx", "4096"]
    _, version, _ = await http.get("/api/version")
    assert version["version"].count(".") == 2 and version["tierd"]


async def test_what_is_loaded(http):
    assert (await http.get("/api/ps"))[1] == {"models": []}
    await http.post(CHAT, chat(stream=False, keep_alive="10m"))
    (found,) = (await http.get("/api/ps"))[1]["models"]
    left_s = (datetime.fromisoformat(found["expires_at"]) - datetime.now().astimezone()).total_seconds()
    assert found["name"] == "alpha:latest" and 500 < left_s <= 600


async def test_loading_without_a_question(http):
    status, answer, _ = await http.post(CHAT, {"model": "alpha:latest", "stream": False, "keep_alive": -1})
    assert status == 200 and answer["done_reason"] == "load" and answer["done"]
    (found,) = (await http.get("/api/ps"))[1]["models"]
    assert datetime.fromisoformat(found["expires_at"]).year > 2100
    lines = await stream(http, GENERATE, {"model": "alpha", "prompt": ""})
    assert [line["done_reason"] for line in lines] == ["load"]


async def test_a_load_that_takes_long_says_that_it_goes_on(http, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.02)
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.02)
    set_options(http.front.settings.models_dir / "alpha", start_s=0.6)
    lines = await stream(http, GENERATE, {"model": "alpha"})
    assert len(lines) > 3 and not any(line["done"] or line["response"] for line in lines[:-1])
    assert lines[-1]["done_reason"] == "load"
    assert (await http.post(GENERATE, {"model": "alpha", "stream": False}))[1]["done_reason"] == "load"


async def test_a_load_of_no_model_is_a_status(http):
    assert (await http.post(GENERATE, {"model": "nobody"}))[0] == 404


async def test_keep_alive_of_zero_unloads(http):
    await http.post(CHAT, chat(stream=False))
    status, answer, _ = await http.post(GENERATE, {"model": "alpha", "keep_alive": 0, "stream": False})
    assert status == 200 and answer["done_reason"] == "unload" and answer["response"] == ""
    await until(lambda: not http.front.supervisor.engines)
    await http.post(CHAT, chat(stream=False, keep_alive=0))
    await until(lambda: not http.front.supervisor.engines)


async def test_keys_do_not_say_how_long_models_stay(http):
    _, key = keys.add(http.front.settings.keys_file, "one")
    sent = {"Authorization": f"Bearer {key}"}
    assert (await http.post(CHAT, chat(stream=False, keep_alive=0), **sent))[0] == 200
    status, answer, _ = await http.post(GENERATE, {"model": "alpha", "keep_alive": 0, "stream": False}, **sent)
    assert status == 403 and "not unload" in answer["error"]
    assert (await http.post(GENERATE, {"model": "alpha", "keep_alive": -1, "stream": False}, **sent))[0] == 200
    assert http.front.engine("alpha").keep_alive is None


async def test_deleting(http):
    make_model(http.front.settings.models_dir, "gone")
    (http.front.settings.models_dir / "gone" / "fake.json").unlink()
    async with http.session.delete(http.url + "/api/delete", json={"model": "gone:latest"}) as response:
        assert response.status == 200
    assert not (http.front.settings.models_dir / "gone").exists()
    async with http.session.delete(http.url + "/api/delete", json={"model": "gone"}) as response:
        assert response.status == 404


async def test_a_model_in_use_is_not_deleted(http):
    waiting = asyncio.create_task(http.post(CHAT, chat("!hang", stream=False)))
    await until(lambda: any(s.live.accepted for s in http.front.service._places))
    async with http.session.delete(http.url + "/api/delete", json={"model": "alpha"}) as response:
        assert response.status == 409 and "in use" in (await response.json())["error"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.fixture
def fake_pull(monkeypatch):
    """Lets pulls say these lines instead of pulling."""

    def use(*lines):
        code = f"import sys\nfor line in {list(lines)!r}: print(line, flush=True)"
        monkeypatch.setattr(puller, "COMMAND", (sys.executable, "-S", "-c", code))

    return use


DOWNLOAD = '{"stage": "download", "done": 1, "total": 2}'


async def test_pulling_tells_how_far_it_is(http, fake_pull):
    fake_pull(DOWNLOAD, '{"name": "x"}')
    lines = await stream(http, "/api/pull", {"model": "smollm2:135m"})
    assert lines[0] == {"status": "pulling manifest"} and lines[1]["completed"] == 1
    assert lines[-1] == {"status": "success"}
    status, answer, _ = await http.post("/api/pull", {"model": "x", "stream": False})
    assert status == 200 and answer == {"status": "success"}


async def test_a_pull_that_takes_long_says_that_it_goes_on(http, monkeypatch):
    go = http.front.settings.cache_dir / "go"
    go.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(go)  # the pull goes on when somebody writes into it
    code = f"print({DOWNLOAD!r}, flush=True)\nopen({str(go)!r}).read()\nprint('{{\"name\": \"x\"}}', flush=True)"
    monkeypatch.setattr(puller, "COMMAND", (sys.executable, "-S", "-c", code))
    monkeypatch.setattr(sse, "PING_S", 0.02)
    async with http.session.post(http.url + "/api/pull", json={"model": "x"}) as response:
        seen = []
        while len(seen) < 6:
            seen.append(json.loads(await response.content.readline()))
        assert seen[0] == {"status": "pulling manifest"} and seen[-1] == seen[-2] and seen[-1]["completed"] == 1
        await asyncio.to_thread(go.write_text, "go")
        assert json.loads((await response.read()).splitlines()[-1]) == {"status": "success"}


async def test_a_pull_that_fails_is_a_line_or_a_status(http, fake_pull):
    error = '{"error": {"code": "download_failed", "message": "no network"}}'
    fake_pull(DOWNLOAD, error)
    assert (await stream(http, "/api/pull", {"model": "x"}))[-1] == {"error": "no network"}
    fake_pull(error)
    assert (await http.post("/api/pull", {"model": "x"}))[:2] == (502, {"error": "no network"})


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_an_engine_killed_in_the_middle_is_not_seen(shared):
    lines = await stream(shared, CHAT, chat("!crash=6"))
    assert "".join(line["message"]["content"] for line in lines) == whole_text("user:!crash=6\n", 12)
    assert ends(lines) == [len(lines) - 1]


async def test_a_failure_in_the_middle_is_a_line_and_the_end(http):
    lines = await stream(http, CHAT, chat("!always=1"))
    assert ends(lines) == [len(lines) - 1] and list(lines[-1]) == ["error"] and "/home" not in str(lines[-1])


async def test_a_client_that_goes_ends_its_generation(http, monkeypatch):
    monkeypatch.setattr(sse, "PING_S", 0.05)
    async with http.session.post(http.url + CHAT, json=chat("!hang")) as response:
        seen = b""
        while seen.count(b"\n") < 3:  # pings are lines without text
            seen += await response.content.readany()
        assert all(json.loads(line)["message"]["content"] == "" for line in seen.splitlines())
    await until(lambda: http.front.service.live == 0)


@pytest.mark.parametrize(("listen", "is_one"), [("127.0.0.1:11434", True), ("127.0.0.1:8421", False), ("", False)])
def test_who_listens_where_ollama_does(listen, is_one):
    assert ollama_routes.is_ollama_mode(listen) == is_one


async def test_who_is_here(http, monkeypatch):
    assert (await http.get("/"))[1] == "tierd is running\n"
    monkeypatch.setattr(ollama_routes, "PORT", 0)
    assert (await http.get("/"))[1] == "Ollama is running"
