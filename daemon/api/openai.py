"""The OpenAI dialect: JSON bodies to `Submit`, events to answers. Pure: no I/O, the clock and ids are arguments.

A field that would change the answer and that tierd does not have is refused by name, unless its value is the one that
changes nothing (`n: 1`, `tools: []`, anything null). What only describes the request is accepted and not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tierd.daemon.errors import BadRequest, EngineFailed, TierdError, TryLater, Unsupported, suggest
from tierd.daemon.protocol import Message, Sampling, Submit

COMPLETION_MAX_TOKENS = 16  # the documented default of /v1/completions; chat runs to the end of the context
# They describe the request or its sender, and change no token of the answer.
METADATA = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"})
# Documented fields that tierd does not have, and the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_retention": (),
}
_NEUTRAL_BYTES = 64  # longer values are none of the above, and are not even decoded


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part] | None = None
    # What an SDK sends back of an answer it got: fine as long as nothing is in it.
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_call_id: None = None
    tool_calls: list[None] | None = None
    annotations: list[None] | None = None


class _Common(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    # Not of OpenAI, spelled as in other servers.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Turn]
    max_completion_tokens: int | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]


_B = TypeVar("_B", _Chat, _Completion)


class Call(NamedTuple):
    """A request as the doors want it."""

    submit: Submit
    stream: bool
    include_usage: bool


def parse_chat(body: bytes) -> Call:
    """The body of /v1/chat/completions. Raises BadRequest or Unsupported that names the field."""
    chat = _decode(body, _Chat)
    limit = chat.max_tokens
    if chat.max_completion_tokens is not None:
        if limit not in (None, chat.max_completion_tokens):
            raise BadRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        limit = chat.max_completion_tokens
    messages = tuple(_message(index, turn) for index, turn in enumerate(chat.messages))
    return _call(chat, Submit(model=chat.model, messages=messages, sampling=_sampling(chat, limit)))


def parse_completion(body: bytes) -> Call:
    """The body of /v1/completions: one prompt, as text or as token ids."""
    given = _decode(body, _Completion)
    limit = COMPLETION_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    sampling = _sampling(given, limit)
    prompt = given.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]  # a list of integers is a list of "integers or ..."
    if isinstance(prompt, str):
        return _call(given, Submit(model=given.model, prompt=prompt, sampling=sampling))
    tokens = tuple(token for token in prompt if isinstance(token, int))
    if len(tokens) != len(prompt):
        raise Unsupported("several prompts in one request are not supported: send one request each", param="prompt")
    return _call(given, Submit(model=given.model, tokens=tokens, sampling=sampling))


def _call(given: _Common, submit: Submit) -> Call:
    options = given.stream_options
    return Call(submit, bool(given.stream), bool(options and options.include_usage))


def _decode(body: bytes, kind: type[_B]) -> _B:
    known = [field.name for field in msgspec.structs.fields(kind)]
    try:
        # The values stay bytes here: 32 MiB of brackets would become a gigabyte of lists.
        for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            if name not in known and name not in METADATA:
                _check_neutral(name, bytes(raw), known)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise _bad_field(str(exc)) from None
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise BadRequest(f"the body is not valid JSON: {exc}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _check_neutral(name: str, raw: bytes, known: list[str]) -> None:
    value = msgspec.json.decode(raw) if len(raw) <= _NEUTRAL_BYTES else raw
    if value is None:
        return
    if name not in _NEUTRAL:
        raise Unsupported(f"unknown field {name[:64]!r}", hint=suggest(name[:64], known), param=name[:64])
    # `True == 1` in Python, and {"n": true} is a mistake to tell.
    if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
        raise Unsupported(f"{name} is not supported", param=name)


def _message(index: int, turn: _Turn) -> Message:
    where = f"messages[{index}]"
    role = "system" if turn.role == "developer" else turn.role
    if role in ("tool", "function"):
        raise Unsupported("tools are not supported", param=f"{where}.role")
    if turn.content is None:
        raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(turn.content, str):
        return Message(role, turn.content)
    texts = []
    for number, part in enumerate(turn.content):
        if part.type != "text" or part.text is None:
            raise Unsupported("only content of type text is supported", param=f"{where}.content[{number}]")
        texts.append(part.text)
    return Message(role, "\n".join(texts))


def _sampling(given: _Common, max_tokens: int | None) -> Sampling:
    stop = given.stop if isinstance(given.stop, list) else [given.stop] if given.stop is not None else []
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
    values = {name: value for name in names if (value := getattr(given, name)) is not None}
    return Sampling(
        temperature=given.temperature, seed=given.seed, stop=tuple(stop), max_tokens=max_tokens,
        logit_bias=given.logit_bias or {}, **values,
    )  # fmt: skip


_AT = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(.*?)`")


def _bad_field(text: str) -> BadRequest:
    """msgspec's sentence with the field named as a user writes it."""
    found = _AT.match(text)
    what, path = (found[1], found[2] or "") if found else (text, "")
    if named := _NAMED.match(what):
        path = ".".join(part for part in (path, named[1]) if part)[:128]
        if "unknown" in what:
            return Unsupported(f"unknown field {path!r}", param=path)
        return BadRequest(f"{path} is missing", param=path)
    if not path and what.startswith("Expected `object`"):
        return BadRequest("the body is not a JSON object")
    return BadRequest(f"{path or 'body'}: {what.replace('`', '')}", param=path or None)


# -- answers -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What is the same in every piece of one answer, and how the two endpoints differ."""

    chat: bool
    id: str
    created: int
    model: str

    def whole(self, text: str, done: Mapping[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        body: dict[str, Any] = {"text": text}
        if self.chat:
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": done["finish"]}
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "usage": usage(done.get("usage", {})),
            "timings": done.get("timings", {}),
        }

    def first(self) -> dict[str, Any] | None:
        """The first piece of a stream, before any text."""
        return self._piece({"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def text(self, text: str) -> dict[str, Any]:
        """A piece with text."""
        return self._piece({"delta": {"content": text}} if self.chat else {"text": text})

    def last(self, done: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
        """The piece with the reason of the end, and the one with the counts if it was asked for."""
        # Some clients read `content` in every delta: it is never absent.
        end = self._piece({"delta": {"content": ""}} if self.chat else {"text": ""}, done["finish"])
        timings = {"timings": done.get("timings", {})}
        if not include_usage:
            return [end | timings]
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return [end, {**head, "choices": [], "usage": usage(done.get("usage", {})), **timings}]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _piece(self, body: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}


def usage(counts: Mapping[str, int]) -> dict[str, Any]:
    """Token counts under OpenAI's names."""
    prompt, completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counts.get("cached_tokens", 0)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def models(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of /v1/models; directories that cannot be used are left out."""
    return {"object": "list", "data": [model(item) for item in listed if not item["problem"]]}


def model(item: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of it."""
    return {
        "id": item["name"],
        "object": "model",
        "created": int(item["created_s"]),
        "owned_by": "tierd",
        "context_length": item["context"],
    }


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error(exc: TierdError) -> dict[str, Any]:
    """The error object, the same before a stream and in it."""
    kind = _TYPES.get(exc.status) or ("invalid_request_error" if exc.status < 500 else "server_error")
    message = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    return {"error": {"message": message, "type": kind, "param": exc.param, "code": exc.code}}


def should_retry(exc: TierdError) -> bool:
    """Whether the same request can succeed later. SDKs retry every 409, 429 and 5xx unless they are told not to."""
    return isinstance(exc, TryLater | EngineFailed)
