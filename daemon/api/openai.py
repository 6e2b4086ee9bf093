"""The OpenAI dialect, inwards: JSON bodies to `Submit`; its errors and lists. Pure: no I/O, no clock.

A field that would change the answer and that tierd does not have is refused by name, unless its value is the one that
changes nothing (`functions: []`, anything null). What only describes the request is accepted and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tierd.daemon import limits
from tierd.daemon.api import bodies, openai_fields
from tierd.daemon.api.openai_types import (
    ChatRequest,
    Common,
    CompletionRequest,
    ErrorAnswer,
    ErrorBody,
    GivenCall,
    GivenTool,
    Model,
    ModelList,
    ResponseFormat,
    Turn,
)
from tierd.daemon.errors import BadRequest, TierdError, Unsupported, sentence
from tierd.daemon.protocol import Format, Message, Sampling, Submit, Tool, ToolCall

COMPLETION_MAX_TOKENS = 16  # the documented default of /v1/completions; chat runs to the end of the context
# They describe the request or its sender, and change no token of the answer.
METADATA = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"})
# Documented fields that tierd does not have, and the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}
_B = TypeVar("_B", ChatRequest, CompletionRequest)


class Call(NamedTuple):
    """A request as the doors want it. `submits`: one for each prompt."""

    submits: tuple[Submit, ...]
    stream: bool
    include_usage: bool
    echo: str = ""  # what each answer begins with: the prompt, if it was asked for


def parse_chat(body: bytes) -> Call:
    """The body of /v1/chat/completions. Raises BadRequest or Unsupported that names the field."""
    chat = _decode(body, ChatRequest)
    limit = chat.max_tokens
    if chat.max_completion_tokens is not None:
        if limit not in (None, chat.max_completion_tokens):
            raise BadRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        limit = chat.max_completion_tokens
    if chat.top_logprobs is not None and not chat.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    limits.check_count("messages", chat.messages, limits.MAX_MESSAGES)
    limits.check_count("tools", chat.tools, limits.MAX_TOOLS)
    options = chat.prompt_cache_options
    template = chat.chat_template_kwargs.enable_thinking if chat.chat_template_kwargs else None
    effort = openai_fields.thinking(chat.reasoning_effort, "reasoning_effort")
    messages = tuple(_message(f"messages[{index}]", turn) for index, turn in enumerate(chat.messages))
    submit = Submit(
        model=chat.model,
        messages=messages,
        sampling=_sampling(chat, limit),
        tools=tuple(_tool(f"tools[{index}]", given) for index, given in enumerate(chat.tools or ())),
        tool_choice=openai_fields.tool_choice(chat.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        format=_format(chat, chat.response_format),
        thinking=effort if template is None else template,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        n=_or(chat.n, 1),
        best_of=_or(chat.best_of, 1),
        keep=openai_fields.keep(chat.prompt_cache_retention, options.ttl if options else None, len(messages)),
        salt=chat.cache_salt or "",
        kv_mode=chat.kv_mode,
    )
    return _call(chat, (submit,))


def parse_completion(body: bytes) -> Call:
    """The body of /v1/completions."""
    given = _decode(body, CompletionRequest)
    limit = COMPLETION_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    common = Submit(
        model=given.model,
        suffix=given.suffix or None,
        sampling=_sampling(given, limit),
        format=_format(given, given.response_format),
        logprobs=given.logprobs,
        n=_or(given.n, 1),
        best_of=_or(given.best_of, 1),
        beam_width=given.beam_width or 0,
        salt=given.cache_salt or "",
        kv_mode=given.kv_mode,
    )
    prompts = [msgspec.structs.replace(common, **fields) for fields in _prompts(given.prompt, common.n)]
    echo = ""
    if given.echo:
        if len(prompts) > 1 or prompts[0].prompt is None:
            raise Unsupported("echo is there for one prompt of text", param="echo")
        if given.logprobs is not None:
            raise Unsupported("echo and logprobs together: a prompt's log probabilities are not computed", param="echo")
        echo = prompts[0].prompt
    return _call(given, tuple(prompts), echo)


def _call(given: Common, submits: tuple[Submit, ...], echo: str = "") -> Call:
    options = given.stream_options
    return Call(submits, bool(given.stream), bool(options and options.include_usage), echo)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _decode(body: bytes, kind: type[_B]) -> _B:
    known = list(kind.__struct_encode_fields__)  # `structs.fields` takes 5 ms
    openai_fields.check_unknown(bodies.decode(body, dict[str, msgspec.Raw]), known, METADATA, NEUTRAL)
    return bodies.decode(body, kind)


def _prompts(given: str | list[str | int | list[int]], n: int) -> list[dict[str, Any]]:
    """The input fields of each submit. Raises BadRequest when they would have too many answers together."""
    if isinstance(given, str):
        return [{"prompt": given}]
    if all(isinstance(part, int) for part in given):
        return [{"tokens": tuple(given)}]  # of none, too: that is told as an empty prompt
    if (answers := len(given) * max(n, 1)) > limits.MAX_ANSWERS:
        what = f"{answers} answers are asked for at once, at most {limits.MAX_ANSWERS} are possible"
        raise BadRequest(what, param="prompt")
    prompts: list[dict[str, Any]] = []
    for part in given:
        if isinstance(part, int):
            raise BadRequest("prompt mixes token ids with prompts", param="prompt")
        prompts.append({"prompt": part} if isinstance(part, str) else {"tokens": tuple(part)})
    return prompts


def _message(where: str, turn: Turn) -> Message:
    role = "system" if turn.role == "developer" else turn.role
    if role == "function":
        raise Unsupported("messages of role function are not supported: use tool", param=f"{where}.role")
    limits.check_count(f"{where}.tool_calls", turn.tool_calls, limits.MAX_CALLS)
    calls = tuple(_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(turn.tool_calls or ()))
    if role == "tool" and not turn.tool_call_id:
        raise BadRequest(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
    if turn.content is None and role != "assistant":
        raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
    if turn.name and role != "tool":
        raise Unsupported("names of participants are not supported", param=f"{where}.name")
    if isinstance(turn.content, list):
        limits.check_count(f"{where}.content", turn.content, limits.MAX_PARTS)
    return Message(
        role,
        openai_fields.text_of(turn.content, f"{where}.content"),
        thinking=turn.reasoning_content or turn.reasoning or "",
        tool_calls=calls,
        tool_call_id=turn.tool_call_id or "",
        name=turn.name or "",
    )


def _tool_call(where: str, call: GivenCall) -> ToolCall:
    if call.type != "function":
        raise Unsupported("of the kinds of tool calls there is only function", param=f"{where}.type")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _tool(where: str, given: GivenTool) -> Tool:
    if given.type != "function":
        raise Unsupported("of the kinds of tools there is only function", param=f"{where}.type")
    if given.function is None:
        raise BadRequest(f"{where}.function is missing", param=f"{where}.function")
    return openai_fields.tool(given.function)


def _format(given: Common, response_format: ResponseFormat | None) -> Format | None:
    """What the answer is held to, by whichever field asks for it. Two are one too many."""
    found: list[Format] = []
    if response_format is not None and (asked := _response_format(response_format)) is not None:
        found.append(asked)
    if given.guided_json is not None:
        found.append(openai_fields.schema_format(given.guided_json, "guided_json"))
    if given.guided_regex is not None:
        found.append(Format("regex", given.guided_regex))
    if given.guided_grammar is not None:
        found.append(Format("grammar", given.guided_grammar))
    if len(found) > 1:
        raise BadRequest("of response_format and the guided_ fields only one can hold", param="response_format")
    return found[0] if found else None


def _response_format(given: ResponseFormat) -> Format | None:
    match given.type:
        case "text":
            return None
        case "json_object" if given.schema is None:
            return Format("json_object")
        case "json_schema" if given.json_schema is not None:
            return openai_fields.schema_format(given.json_schema.schema, "response_format.json_schema.schema")
        case "json_schema" | "json_object":
            return openai_fields.schema_format(given.schema, "response_format.schema")
        case _:
            raise Unsupported(
                "response_format.type must be text, json_object or json_schema", param="response_format.type"
            )


def _sampling(given: Common, max_tokens: int | None) -> Sampling:
    stop = given.stop if isinstance(given.stop, list) else [given.stop] if given.stop is not None else []
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
    values = {name: value for name in names if (value := getattr(given, name)) is not None}
    return Sampling(
        temperature=given.temperature, seed=given.seed, stop=tuple(stop), max_tokens=max_tokens,
        logit_bias=given.logit_bias or {}, **values,
    )  # fmt: skip


# -- lists and errors ----------------------------------------------------------------------------------------------


def models(listed: list[dict[str, Any]]) -> ModelList:
    """The answer of /v1/models; directories that cannot be used are left out."""
    return ModelList([model(item) for item in listed if not item["problem"]])


def model(item: Mapping[str, Any]) -> Model:
    """One entry of it."""
    return Model(item["name"], int(item["created_s"]), item["context"])


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error(exc: TierdError) -> ErrorAnswer:
    """The error object, the same before a stream and in it."""
    kind = _TYPES.get(exc.status) or ("invalid_request_error" if exc.status < 500 else "server_error")
    return ErrorAnswer(ErrorBody(sentence(exc), kind, exc.param, exc.code))
