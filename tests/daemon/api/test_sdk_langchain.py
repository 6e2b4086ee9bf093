"""The `langchain-openai` package against a running daemon.

Behind `long`: its import alone takes seconds of processor. `make test-long` installs it with the extra `sdk`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import openai
import pydantic
import pytest
from fake_engine import numbers, whole_text
from sdk_daemon import Served, crowded, served

# What it leaves to the collector, and what pydantic says of its types, are not for us to mend.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


class Person(pydantic.BaseModel):
    """Somebody."""

    name: str
    age: int


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("langchain"), max_streams=4, max_queue=4)


@pytest.fixture
def chat(daemon: Served):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI

    def make(**options):
        given = {"model": "alpha", "base_url": f"{daemon.url}/v1", "api_key": "any", "temperature": 0, "max_tokens": 12,
                 "max_retries": 0}  # fmt: skip
        return ChatOpenAI(**(given | options))

    return make


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}])
def test_plain_and_streamed(chat, options):
    model = chat(**options)
    plain = model.invoke("hi")
    assert plain.text == whole_text("user:hi\n", 12) and plain.usage_metadata["input_token_details"]["cache_read"] == 2
    assert "".join(chunk.text for chunk in model.stream("hi")) == plain.text


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}])
def test_tools_and_their_answers(chat, options):
    from langchain_core.messages import HumanMessage, ToolMessage

    def look(where: str) -> str:
        """Looks somewhere."""
        return where

    model = chat(**options).bind_tools([look])
    turns = [HumanMessage("!calls=2")]
    called = model.invoke(turns)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("look", {"where": "page"})] * 2
    streamed = None
    for chunk in model.stream(turns):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls == called.tool_calls
    answers = [ToolMessage("a page", tool_call_id=call["id"]) for call in called.tool_calls]
    assert model.invoke([*turns, called, *answers]).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    assert chat().with_structured_output(Person, method=method).invoke("hi") == Person(name="page", age=7)


def test_errors(chat):
    with pytest.raises(openai.BadRequestError):
        chat().invoke("!refuse")
    with pytest.raises(openai.APITimeoutError):
        chat(timeout=0.5).invoke("!hang")
    with pytest.raises(openai.APIError):
        list(chat(model="beta").stream("!always=0"))


def test_what_was_busy_is_tried_again(chat, daemon):
    with crowded(daemon.url, 8) as leave_after:
        with pytest.raises(openai.InternalServerError):
            chat().invoke("hi")
        leave_after(0.5)
        assert chat(max_retries=3).invoke("hi").text == whole_text("user:hi\n", 12)


def test_embeddings(daemon):
    from langchain_openai import OpenAIEmbeddings

    # With the check of lengths, which is the default, it sends token ids of another tokenizer.
    given = {"model": "alpha", "base_url": f"{daemon.url}/v1", "api_key": "any", "max_retries": 0}
    model = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    assert model.embed_documents(["a b", "c"]) == [numbers("a b"), numbers("c")]
    assert model.embed_query("a b") == numbers("a b")


async def test_asynchronously_and_in_batches(chat):
    model = chat()
    assert (await model.ainvoke("hi")).text == whole_text("user:hi\n", 12)
    assert "".join([chunk.text async for chunk in model.astream("hi")]) == whole_text("user:hi\n", 12)
    answers = await model.abatch([f"c{n}" for n in range(4)])
    assert [answer.text for answer in answers] == [whole_text(f"user:c{n}\n", 12) for n in range(4)]
