"""The `llm` package with tierd as an OpenAI-compatible model of `extra-openai-models.yaml`.

Behind `long`: its import alone takes two seconds of processor.
"""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import Iterator

import pytest
from fake_engine import whole_text
from sdk_daemon import Served, crowded, served

pytestmark = pytest.mark.long

YAML = """\
- model_id: tierd
  model_name: alpha
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: tierd-responses
  model_name: alpha
  api_base: {url}/v1
  responses: true
  supports_schema: true
  supports_tools: true
- model_id: tierd-text
  model_name: alpha
  api_base: {url}/v1
  completion: true
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("llm"), max_streams=4, max_queue=4)


@pytest.fixture
def llm(daemon: Served, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(YAML.format(url=daemon.url))
    import llm

    return llm


def look(where: str) -> str:
    """Looks somewhere."""
    return f"saw {where}"


@pytest.mark.parametrize("name", ["tierd", "tierd-responses"])
def test_a_prompt_streamed_and_whole(llm, name):
    model = llm.get_model(name)
    for stream in (True, False):
        response = model.prompt("hi", stream=stream)
        assert response.text() == whole_text("user:hi\n", 16)
    assert response.usage().output == 16


@pytest.mark.parametrize("name", ["tierd", "tierd-responses"])
def test_a_chain_of_tools(llm, name):
    seen = []
    chain = llm.get_model(name).chain("!calls=1", tools=[look], after_call=lambda _, call, result: seen.append(
        (call.name, call.arguments, result.output)))  # fmt: skip
    assert chain.text() and seen == [("look", {"where": "page"}, "saw page")]


def test_a_schema(llm):
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    for stream in (True, False):
        assert json.loads(llm.get_model("tierd").prompt("hi", schema=schema, stream=stream).text()) == {
            "name": "page", "age": 7
        }  # fmt: skip


def test_a_conversation_and_a_completion(llm):
    conversation = llm.get_model("tierd").conversation()
    first = conversation.prompt("hi").text()
    assert conversation.prompt("more").text() == whole_text(f"user:hi\nassistant:{first}\nuser:more\n", 16)
    assert llm.get_model("tierd-text").prompt("once", max_tokens=4).text()


def test_asynchronously(llm):
    async def ask():
        response = await llm.get_async_model("tierd").prompt("hi")
        return await response.text()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # llm leaves its connections to the collector
        assert asyncio.run(ask()) == whole_text("user:hi\n", 16)
        gc.collect()


def test_what_was_busy_is_tried_again(llm, daemon):
    with crowded(daemon.url, 8) as leave_after:
        leave_after(0.5)
        assert llm.get_model("tierd").prompt("hi").text() == whole_text("user:hi\n", 16)


def test_an_error_is_told(llm):
    with pytest.raises(Exception, match="4096 allowed"):
        llm.get_model("tierd").prompt("!refuse").text()
