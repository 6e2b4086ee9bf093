"""One request in every dialect: what is asked for in neutral words, and how each dialect spells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Body = dict[str, Any]
# Turns are (role, text), or ("calls", ids): an assistant that called functions.
USER = [("user", "hi")]


class Dialect(NamedTuple):
    """`spell` raises KeyError for a wish that the dialect has no words for. `code` reads an error's code, if it has."""

    path: str
    spell: Callable[[Body], Body]
    code: Callable[[Body], str | None]
    busy: int = 503  # the status for what passes by itself


def _take(asked: Body, names: dict[str, str]) -> Body:
    """The fields of these names under the dialect's, and nothing left over but what the caller takes itself."""
    unknown = asked.keys() - names.keys() - {"messages", "tools", "schema", "regex", "grammar", "logprobs", "marks"}
    if unknown:
        raise KeyError(*unknown)
    return {names[name]: value for name, value in asked.items() if name in names}


def _without(asked: Body, *names: str) -> None:
    if there := asked.keys() & set(names):
        raise KeyError(*there)


_OPENAI = {
    name: name
    for name in (
        "stop", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "max_tokens",
        "repetition_penalty", "logit_bias", "n", "best_of",
    )
} | {"salt": "cache_salt", "regex": "guided_regex", "grammar": "guided_grammar"}  # fmt: skip


def _chat(asked: Body) -> Body:
    _without(asked, "marks")
    body = {"max_tokens": 1} | _take(asked, _OPENAI)
    body["messages"] = [_chat_turn(*turn) for turn in asked.get("messages", USER)]
    if "tools" in asked:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in asked["tools"]
        ]
    if "schema" in asked:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked["schema"]}}
    if "logprobs" in asked:
        body |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    return body


def _chat_turn(role: str, said: Any) -> Body:
    if role != "calls":
        return {"role": role, "content": said}
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in said]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _completion(asked: Body) -> Body:
    _without(asked, "messages", "tools", "marks")
    body = {"max_tokens": 1, "prompt": "hi"} | _take(asked, {**_OPENAI, "beams": "beam_width", "prompt": "prompt"})
    if "schema" in asked:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked["schema"]}}
    return body | ({"logprobs": asked["logprobs"]} if "logprobs" in asked else {})


def _responses(asked: Body) -> Body:
    _without(asked, "regex", "grammar", "marks")
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    body = {"max_output_tokens": 1} | _take(asked, {**names, "salt": "cache_salt", "max_tokens": "max_output_tokens"})
    items: list[Body] = []
    for role, said in asked.get("messages", USER):
        if role == "calls":
            items += [{"type": "function_call", "call_id": one, "name": "f", "arguments": "{}"} for one in said]
        else:
            items.append({"type": "message", "role": role, "content": said})
    body["input"] = items
    if "tools" in asked:
        body["tools"] = [{"type": "function", "name": name, "parameters": schema} for name, schema in asked["tools"]]
    if "schema" in asked:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": asked["schema"]}}
    if "logprobs" in asked:
        body["top_logprobs"] = asked["logprobs"]
    return body


def _anthropic(asked: Body) -> Body:
    _without(asked, "regex", "grammar", "logprobs")
    names = {name: name for name in ("temperature", "top_p", "top_k", "max_tokens")} | {"stop": "stop_sequences"}
    body = {"max_tokens": 1} | _take(asked, names)
    body["messages"] = [_anthropic_turn(*turn) for turn in asked.get("messages", USER)]
    if "tools" in asked:
        body["tools"] = [{"name": name, "input_schema": schema} for name, schema in asked["tools"]]
    if "schema" in asked:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked["schema"]}}
    if "marks" in asked:
        block = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
        body["system"] = [block] * asked["marks"]
    return body


def _anthropic_turn(role: str, said: Any) -> Body:
    if role != "calls":
        return {"role": role, "content": said}
    return {"role": "assistant", "content": [{"type": "tool_use", "id": one, "name": "f", "input": {}} for one in said]}


_OPTIONS = {
    name: name
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
} | {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict", "ctx": "num_ctx"}  # fmt: skip


def _ollama_common(asked: Body) -> Body:
    _without(asked, "regex", "grammar", "marks")
    body: Body = {"stream": False, "options": {"num_predict": 1} | _take(asked, _OPTIONS)}
    if "schema" in asked:
        body["format"] = asked["schema"]
    if "logprobs" in asked:
        body |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    return body


def _ollama(asked: Body) -> Body:
    body = _ollama_common(asked)
    body["messages"] = [_ollama_turn(*turn) for turn in asked.get("messages", USER)]
    if "tools" in asked:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in asked["tools"]
        ]
    return body


def _ollama_turn(role: str, said: Any) -> Body:
    if role != "calls":
        return {"role": role, "content": said}
    calls = [{"id": one, "function": {"name": "f", "arguments": {}}} for one in said]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _generate(asked: Body) -> Body:
    _without(asked, "messages", "tools")
    return _ollama_common(asked) | {"prompt": "hi"}


def _code(answer: Body) -> str | None:
    code: str = answer["error"]["code"]
    return code


def _no_code(answer: Body) -> str | None:
    assert isinstance(answer["error"], str) and answer["error"]
    return None


DIALECTS: dict[str, Dialect] = {
    "chat": Dialect("/v1/chat/completions", _chat, _code),
    "completions": Dialect("/v1/completions", _completion, _code),
    "responses": Dialect("/v1/responses", _responses, _code),
    "anthropic": Dialect("/v1/messages", _anthropic, _code, busy=529),
    "ollama chat": Dialect("/api/chat", _ollama, _no_code),
    "ollama generate": Dialect("/api/generate", _generate, _no_code),
}
