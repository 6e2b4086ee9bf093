"""The `openai` package against a running daemon: what people type, and what they then see."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from fake_engine import numbers, whole_text
from sdk_daemon import Served, served

PROMPT = "user:hi\n"
CHAT: dict[str, Any] = {
    "model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0
}  # fmt: skip
RESPONSE: dict[str, Any] = {"model": "alpha", "input": "hi", "max_output_tokens": 12, "temperature": 0}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}},
                                       "required": ["where"], "additionalProperties": False}}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]


class Person(pydantic.BaseModel):
    name: str
    age: int


def said(words, **fields):
    return CHAT | {"messages": [{"role": "user", "content": words}]} | fields


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("openai"), max_streams=4, max_queue=4)


@pytest.fixture
def client(daemon: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def until_idle(daemon):
    deadline_s = time.monotonic() + 10
    while daemon.live():
        assert time.monotonic() < deadline_s


def test_a_chat_plain_and_streamed(client):
    plain = client.chat.completions.create(**CHAT)
    assert plain.choices[0].message.content == whole_text(PROMPT, 12) and plain.choices[0].finish_reason == "length"
    assert plain.usage.prompt_tokens_details.cached_tokens == 2
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == plain.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]


def test_tools_by_the_helper_that_puts_a_stream_together(client):
    with client.chat.completions.stream(**said("!calls=2"), tools=TOOLS) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion()
    assert names.count("tool_calls.function.arguments.done") == 2
    calls = final.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"where": "page"}] * 2
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "a page"} for call in calls]
    turns = [*CHAT["messages"], final.choices[0].message.model_dump(exclude_unset=True, exclude={"parsed"}), *answers]
    for call in turns[1]["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    after = client.chat.completions.create(**(CHAT | {"messages": turns}), tools=TOOLS)
    assert after.choices[0].message.content and after.choices[0].finish_reason == "length"


def test_structured_output_is_parsed(client):
    parsed = client.chat.completions.parse(**CHAT, response_format=Person).choices[0].message.parsed
    assert parsed == Person(name="page", age=7)


def test_a_response_plain_streamed_and_continued(client):
    plain = client.responses.create(**RESPONSE)
    assert plain.output_text == whole_text(PROMPT, 12) and plain.usage.input_tokens_details.cached_tokens == 2
    with client.responses.stream(**RESPONSE) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    second = client.responses.create(**RESPONSE, previous_response_id=plain.id)
    assert second.output_text == whole_text(f"{PROMPT}assistant:{plain.output_text}\n{PROMPT}", 12)
    assert client.responses.retrieve(plain.id).output_text == plain.output_text
    client.responses.delete(plain.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(plain.id)


def test_errors_have_their_types(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**said("!refuse"))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(CHAT | {"model": "nobody"}))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="alpha", input="x", dimensions=99)
    assert caught.value.param == "dimensions"


def test_embeddings(client):
    found = client.embeddings.create(model="alpha", input=["a b", "c"])  # asks for base64
    assert [item.embedding for item in found.data] == [numbers("a b"), numbers("c")] and found.usage.prompt_tokens == 3
    plain = client.embeddings.create(model="alpha", input=[[1, 2], [3]], encoding_format="float")
    assert [item.embedding for item in plain.data] == [numbers("1 2"), numbers("3")]
    short = client.embeddings.create(model="alpha", input="a b", dimensions=2, encoding_format="float")
    assert len(short.data[0].embedding) == 2


async def test_embeddings_asynchronously(daemon):
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        asked = [client.embeddings.create(model="alpha", input=f"text {n}") for n in range(4)]
        for number, found in enumerate(await asyncio.gather(*asked)):
            assert found.data[0].embedding == numbers(f"text {number}")


# -- the wide matrix -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_failure_in_the_middle_of_a_stream_is_raised_once(client):
    with pytest.raises(openai.APIError, match="died"):
        # Of a model of its own: one whose engines die so fast is not started again for a while.
        list(client.chat.completions.create(**said("!always=0", model="beta"), stream=True))


@pytest.mark.long
async def test_the_asynchronous_client(daemon):
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole_text(PROMPT, 12)
        answers = await asyncio.gather(*(client.chat.completions.create(**said(f"c{n}")) for n in range(6)))
        assert [answer.choices[0].message.content for answer in answers] == [
            whole_text(f"user:c{n}\n", 12) for n in range(6)
        ]


@pytest.mark.long
def test_models(client):
    assert [model.id for model in client.models.list()] == ["alpha", "beta"]
    assert client.models.retrieve("beta").owned_by == "tierd"


@pytest.mark.long
def test_completions_with_all_that_they_have(client):
    body = {"model": "alpha", "prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 4, "seed": 5}
    plain = client.completions.create(**body, logprobs=2)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3] and plain.usage.completion_tokens == 24
    for choice in plain.choices:
        assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[0] == 0
    said = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**body, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert list(said.values()) == [choice.text for choice in plain.choices]
    echoed = client.completions.create(model="alpha", prompt="once ", echo=True, max_tokens=3, temperature=0)
    assert echoed.choices[0].text == "once " + whole_text("once ", 3)
    assert client.completions.create(model="alpha", prompt="def f(", suffix="return x", max_tokens=3).choices


@pytest.mark.long
def test_several_answers_with_logprobs(client):
    plain = client.chat.completions.create(**(CHAT | {"temperature": 0.9}), n=3, seed=1, logprobs=True, top_logprobs=3)
    assert len({choice.message.content for choice in plain.choices}) == 3
    for choice in plain.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in entries)


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}, "none", "auto"])
def test_choices_of_tools(client, choice):
    message = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=choice).choices[0].message
    assert bool(message.tool_calls) == (choice not in ("none", "auto"))


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    [{"type": "json_object"}, {"type": "text"},
     {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": Person.model_json_schema()}}],
)  # fmt: skip
def test_formats(client, form):
    content = client.chat.completions.create(**CHAT, response_format=form).choices[0].message.content
    assert form["type"] == "text" or isinstance(json.loads(content), dict)


@pytest.mark.long
def test_structured_output_in_a_stream_and_in_a_response(client):
    with client.chat.completions.stream(**CHAT, response_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="page", age=7)
    assert client.responses.parse(**RESPONSE, text_format=Person).output_parsed == Person(name="page", age=7)


@pytest.mark.long
def test_an_agent_loop_over_responses_without_the_store(client):
    tools = [{"type": "function", "strict": True, **TOOL}]
    items: list[Any] = [{"role": "user", "content": "!think=2 !calls=2"}]
    body = RESPONSE | {"tools": tools, "store": False, "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(**(body | {"input": items}))
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"] and first.status == "completed"
    items += first.output
    for item in first.output:
        if item.type == "function_call":
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "a page"})
    second = client.responses.create(**(body | {"input": items}))
    assert second.output_text and second.output[0].type == "reasoning"


@pytest.mark.long
def test_events_of_a_response_with_calls(client):
    tools = [{"type": "function", "strict": True, **TOOL}]
    with client.responses.stream(**(RESPONSE | {"input": "!think=2 !calls=1"}), tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments) == {"where": "page"} and final.output[-1].name == "look"


@pytest.mark.long
def test_reasoning(client):
    message = client.chat.completions.create(**said("!think=4"), reasoning_effort="high").choices[0].message
    assert message.reasoning_content == whole_text("user:!think=4\n", 4)
    chunks = client.chat.completions.create(**said("!think=4"), stream=True)
    thought = "".join(getattr(c.choices[0].delta, "reasoning_content", "") for c in chunks)
    assert thought == message.reasoning_content
    body = RESPONSE | {"input": "!think=4"}
    summed = client.responses.create(**body, reasoning={"effort": "low", "summary": "auto"})
    assert summed.output[0].summary[0].text == thought and summed.usage.output_tokens_details.reasoning_tokens == 4


@pytest.mark.long
def test_an_engine_that_dies_in_the_middle_is_not_noticed(client):
    for n, api in enumerate((client.chat.completions.create, client.completions.create)):
        body = said(f"!crash=5 {n}") if n == 0 else {"model": "alpha", "prompt": f"!crash=5 {n}", "max_tokens": 12,
                                                     "temperature": 0}  # fmt: skip
        chunks = list(api(**body, stream=True))
        text = "".join(c.choices[0].delta.content if n == 0 else c.choices[0].text for c in chunks)
        assert text == whole_text(f"user:!crash=5 {n}\n" if n == 0 else f"!crash=5 {n}", 12)


@pytest.mark.long
def test_what_was_busy_is_tried_again_and_what_was_wrong_is_not(daemon):
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=3) as client:
        hung = [client.chat.completions.create(**said(f"!hang {n}"), stream=True) for n in range(8)]

        def release():
            for stream in hung[:4]:
                stream.close()

        timer = threading.Timer(0.5, release)
        timer.start()
        started_s = time.monotonic()
        assert client.chat.completions.create(**CHAT).choices
        assert time.monotonic() - started_s > 1.5  # Retry-After was obeyed
        timer.join()
        for stream in hung[4:]:
            stream.close()
        started_s = time.monotonic()
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**said("!refuse"))
        assert time.monotonic() - started_s < 1.0
    until_idle(daemon)


@pytest.mark.long
def test_a_timeout_of_the_client_ends_the_generation(daemon, client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**said("!hang"))
    until_idle(daemon)
    for api, body in ((client.chat.completions.create, said("!hang")),
    (client.responses.create, RESPONSE | {"input": "!hang"})):
        api(**body, stream=True).close()
        until_idle(daemon)


@pytest.mark.long
def test_a_wrong_key(tmp_path):
    for daemon in served(tmp_path, api_key="geheim"):
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="wrong", max_retries=2) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            assert client.with_options(api_key="geheim").models.list().data
