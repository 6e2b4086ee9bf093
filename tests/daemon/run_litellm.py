"""`litellm` against the daemon at `run_litellm.py URL`: what it gets, as JSON on the standard output.

A process of its own: it leaves threads, event loops and sockets behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network for a list of prices

import litellm
from sdk_daemon import crowded

URL = sys.argv[1]
ASK: dict[str, Any] = {"model": "openai/alpha", "api_base": f"{URL}/v1", "api_key": "any", "temperature": 0,
                       "max_tokens": 12, "num_retries": 0, "max_retries": 0}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"where": {"type": "string"}}}}}]  # fmt: skip


def ask(words: str = "hi", **fields: Any) -> dict[str, Any]:
    return ASK | {"messages": [{"role": "user", "content": words}]} | fields


def calls(message: Any) -> list[Any]:
    return [[call.id, call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]


def text(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def plain() -> Any:
    answer = litellm.completion(**ask())
    return [answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens]


def streamed() -> Any:
    chunks = list(litellm.completion(**ask(), stream=True, stream_options={"include_usage": True}))
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    return [text(chunks), ends, sum(getattr(chunk, "usage", None) is not None for chunk in chunks)]


def tools() -> Any:
    return calls(litellm.completion(**ask("!calls=2", tools=TOOLS)).choices[0].message)


def tools_streamed() -> Any:
    chunks = list(litellm.completion(**ask("!calls=2", tools=TOOLS), stream=True))
    return calls(litellm.stream_chunk_builder(chunks).choices[0].message)


def tools_answered() -> Any:
    body = ask("!calls=2", tools=TOOLS)
    message = litellm.completion(**body).choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "a page"} for call in message.tool_calls]
    turns = [*body["messages"], message.model_dump(), *answers]
    return litellm.completion(**(body | {"messages": turns})).choices[0].finish_reason


def schema() -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": {
        "type": "object", "properties": {"age": {"type": "integer"}}}}}  # fmt: skip
    return json.loads(litellm.completion(**ask(), response_format=form).choices[0].message.content)


def thinking() -> Any:
    return litellm.completion(**ask("!think=3")).choices[0].message.reasoning_content


def response() -> Any:
    given = {name: ASK[name] for name in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(**given, input="hi", max_output_tokens=16)  # less is raised to it
    return answer.output[0].content[0].text


def embedded() -> Any:
    given = {name: ASK[name] for name in ("model", "api_base", "api_key")}
    answer = litellm.embedding(**given, input=["a b", "c"], encoding_format="float")
    return [[item["embedding"] for item in answer.data], answer.usage.prompt_tokens]


def too_long() -> Any:
    return litellm.completion(**ask("!refuse")) and None


def no_model() -> Any:
    return litellm.completion(**ask(model="openai/nobody")) and None


def timeout() -> Any:
    return litellm.completion(**ask("!hang"), timeout=0.5) and None


def busy() -> Any:
    with crowded(URL, 8):
        return litellm.completion(**ask()) and None


def tried_again() -> Any:
    with crowded(URL, 8) as leave_after:
        leave_after(0.5)
        return litellm.completion(**ask(num_retries=3, max_retries=3)).choices[0].message.content


def broken_stream() -> Any:
    return list(litellm.completion(**ask("!always=0", model="openai/beta"), stream=True)) and None


def asynchronous() -> Any:
    async def both() -> list[str]:
        answer = await litellm.acompletion(**ask())
        stream = await litellm.acompletion(**ask(), stream=True)
        return [answer.choices[0].message.content, text([chunk async for chunk in stream])]

    return asyncio.run(both())


if __name__ == "__main__":
    told: dict[str, Any] = {}
    for check in (plain, streamed, tools, tools_streamed, tools_answered, schema, thinking, response, embedded,
                  too_long, no_model, timeout, busy, tried_again, broken_stream, asynchronous):  # fmt: skip
        try:
            told[check.__name__] = check()
        except Exception as exc:
            told[check.__name__] = f"{type(exc).__name__}: {exc}"
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # its threads are not waited for
