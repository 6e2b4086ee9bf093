"""The paths of embeddings, over HTTP."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import numbers
from front_harness import until

from tierd.daemon import keys, tenants
from tierd.daemon.embedding import MAX_INPUTS


async def test_openai(http):
    status, answer, _ = await http.post("/v1/embeddings", {"model": "alpha", "input": ["a b", "c"]})
    assert status == 200 and answer["object"] == "list" and answer["model"] == "alpha"
    assert [item["embedding"] for item in answer["data"]] == [numbers("a b"), numbers("c")]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


async def test_ollama(http):
    status, answer, _ = await http.post("/api/embed", {"model": "alpha:latest", "input": "a b"})
    assert status == 200 and answer["embeddings"] == [numbers("a b")] and answer["model"] == "alpha:latest"
    status, answer, _ = await http.post("/api/embeddings", {"model": "alpha", "prompt": "a b"})
    assert status == 200 and answer == {"embedding": numbers("a b")}


async def test_ollama_without_input_loads_the_model(http):
    assert (await http.post("/api/embed", {"model": "alpha", "keep_alive": -1}))[1]["embeddings"] == []
    assert http.front.engine("alpha").keep_alive == (None,)
    assert (await http.post("/api/embeddings", {"model": "alpha"}))[1] == {"embedding": []}


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"input": []}, 400, "bad_request", "input"),
        ({"input": ""}, 400, "bad_request", "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, 400, "bad_request", "input"),
        ({"input": "a", "dimensions": 5}, 400, "bad_request", "dimensions"),
        ({"input": "a", "dimensions": 0}, 400, "bad_request", "dimensions"),
        ({"input": "a", "model": "gamma"}, 404, "model_not_found", None),
        ({"input": "!refuse"}, 400, "context_length_exceeded", None),
    ],
)
async def test_errors(shared, fields, status, code, param):
    found, answer, headers = await shared.post("/v1/embeddings", {"model": "alpha"} | fields)
    assert (found, answer["error"]["code"], headers["x-should-retry"]) == (status, code, "false")
    assert param is None or answer["error"]["param"] == param
    if "model" not in fields:
        assert (await shared.post("/api/embed", {"model": "alpha", **fields}))[0] in (status, 200)


async def test_a_client_that_leaves_ends_the_work(http):
    await http.front.service.load("alpha")
    task = asyncio.create_task(http.post("/v1/embeddings", {"model": "alpha", "input": "!hang"}))
    await until(lambda: http.front.service.live)
    task.cancel()
    await until(lambda: not http.front.service.live and not http.front.engine("alpha").busy)


async def test_a_key_has_its_limit_of_requests_and_no_say_in_how_long_models_stay(http):
    _, key = keys.add(http.front.settings.keys_file, "one", max_requests=1)
    sent = {"Authorization": f"Bearer {key}"}
    hanging = asyncio.create_task(http.post("/v1/embeddings", {"model": "alpha", "input": "!hang"}, **sent))
    await until(lambda: http.front.service.live)
    status, answer, _ = await http.post("/v1/embeddings", {"model": "alpha", "input": "a"}, **sent)
    assert status == 429 and answer["error"]["code"] == "quota_exceeded"
    hanging.cancel()
    await until(lambda: not http.front.service.live)
    assert (await http.post("/api/embed", {"model": "alpha", "input": "a", "keep_alive": 0}, **sent))[0] == 200
    assert http.front.engine("alpha").keep_alive is None


async def test_they_are_made_in_the_name_of_the_key(http):
    key, text = keys.add(http.front.settings.keys_file, "one")
    seen = []
    embed = http.front.service.embed

    async def spy(ref, inputs, tenant, door, **more):
        seen.append(tenant)
        return await embed(ref, inputs, tenant, door, **more)

    http.front.service.embed = spy
    sent = {"Authorization": f"Bearer {text}"}
    asked = {"/v1/embeddings": "input", "/api/embed": "input", "/api/embeddings": "prompt"}
    for path, field in asked.items():
        body = {field: "a"}
        assert (await http.post(path, {"model": "alpha", **body}, **sent))[0] == 200
    assert seen == [tenants.of_key(key)] * 3
