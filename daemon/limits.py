"""What a generation may ask for. One check for all dialects, before anything is allocated for the request."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Sized
from typing import Any

import msgspec

from tierd.daemon import kv_mode
from tierd.daemon.config_values import MIN_CONTEXT_TOKENS
from tierd.daemon.errors import BadRequest
from tierd.daemon.generation import MAX_FORMAT_CHARS as MAX_FORMAT_CHARS
from tierd.daemon.generation import MAX_TOOLS as MAX_TOOLS
from tierd.daemon.protocol import Format, Message, Sampling, Submit, Tool

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 16384
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PENALTY = 100.0
MAX_PRIORITY = 100
MAX_SEED = (1 << 63) - 1
MAX_CALLS = 128  # in one message
MAX_CALL_ID_CHARS = 256
MAX_SCHEMA_DEPTH = 48  # levels of JSON; a frame and a body have a few around it
MAX_SCHEMA_VALUES = 16384  # of one schema
MAX_TOOL_VALUES = 65536  # of all tools together
MAX_LOGPROBS = 20
MAX_PARTS = 4096  # of one message, in dialects whose messages have parts
MAX_FIELDS = 1024  # of an object whose fields are looked at one by one
MAX_ANSWERS = 64  # engine streams of one request: n or best_of, times the number of prompts
MAX_BEAMS = 32
MAX_KEEPS = 4
MAX_KEEP_S = 86400.0
MAX_SALT_CHARS = 256
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_submit(submit: Submit, context_tokens: int) -> None:
    """Raises BadRequest that names the first field whose value makes no sense.

    `context_tokens`: what the model was trained for. Whether the prompt fits is known when it is tokenized: the engine
    says so.
    """
    _check_input(submit)
    mode = kv_mode.parse(submit.kv_mode or kv_mode.EXACT)
    _check_sampling(submit.sampling, kv_mode.MAX_TOKENS if mode is not None and mode.endless else context_tokens)
    _check_tools(submit)
    if submit.format is not None:
        _check_format(submit.format)
    _check_answers(submit)
    _check_cache(submit)
    if submit.ctx is not None and not MIN_CONTEXT_TOKENS <= submit.ctx <= context_tokens:
        raise _bad("ctx", f"must be from {MIN_CONTEXT_TOKENS} to the model's {context_tokens} tokens, not {submit.ctx}")
    if abs(submit.priority) > MAX_PRIORITY:
        raise _bad("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")


def check_count(where: str, given: Sized | None, most: int) -> None:
    """Raises BadRequest that names the field when it has too many entries.

    For dialects, before they make anything of each: bodies are parsed where every connection is served.
    """
    if given is not None and len(given) > most:
        raise _bad(where, f"has {len(given)} entries, at most {most} are allowed")


def fitted(submit: Submit, context_tokens: int) -> Submit:
    """The same with a `max_tokens` of at most the context, for dialects whose clients send one figure to every model.

    It is a bound, and an answer that reaches the context says so: nothing is cut silently.
    """
    sampling = submit.sampling
    if sampling.max_tokens is None or sampling.max_tokens <= context_tokens:
        return submit
    mode = kv_mode.parse(submit.kv_mode or kv_mode.EXACT)
    if mode is not None and mode.endless:
        return submit
    sampling = msgspec.structs.replace(sampling, max_tokens=context_tokens)
    return msgspec.structs.replace(submit, sampling=sampling)


def with_mode(submits: Sequence[Submit], default: str) -> list[Submit]:
    """The same, with the daemon's own memory mode where that is left open. Beams always keep all."""
    is_open = [bool(default) and one.kv_mode is None and not one.beam_width for one in submits]
    return [
        msgspec.structs.replace(one, kv_mode=default) if opened else one
        for one, opened in zip(submits, is_open, strict=True)
    ]


def _check_input(submit: Submit) -> None:
    given = [name for name in ("messages", "prompt", "tokens") if getattr(submit, name) is not None]
    if len(given) != 1:
        said = " and ".join(given) if given else "none of them"
        raise BadRequest(f"exactly one of messages, prompt and tokens is needed, there is {said}", param="messages")
    if submit.messages is not None:
        if not submit.messages:
            raise _bad("messages", "is empty")
        if len(submit.messages) > MAX_MESSAGES:
            raise _bad("messages", f"has {len(submit.messages)} entries, at most {MAX_MESSAGES} are allowed")
        _check_messages(submit.messages)
    elif submit.prompt is not None:
        if not submit.prompt:
            raise _bad("prompt", "is empty")
    elif submit.tokens is not None:
        if not submit.tokens:
            raise _bad("tokens", "is empty")
        if not all(0 <= token <= MAX_TOKEN_ID for token in submit.tokens):
            raise _bad("tokens", "holds a number that is no token id")
    if submit.before:
        _check_before(submit)


def _check_before(submit: Submit) -> None:
    if submit.messages is None:
        raise _bad("before", "needs messages")
    if submit.keep:
        raise _bad("before", "and keep exclude each other")
    if not all(0 <= token <= MAX_TOKEN_ID for token in submit.before):
        raise _bad("before", "holds a number that is no token id")


def _check_messages(messages: tuple[Message, ...]) -> None:
    """Roles, what belongs to which of them, and that every answer of a tool answers a call made before."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise _bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if message.role != "assistant" and (message.tool_calls or message.thinking):
            raise _bad(where, "has tool calls or thinking, which only an assistant has")
        if message.role != "tool" and (message.tool_call_id or message.name):
            raise _bad(where, "has a tool_call_id or a name, which only the answer of a tool has")
        if message.name and not NAME.fullmatch(message.name):
            raise _bad(f"{where}.name", f"must fit {NAME.pattern}")
        # Dialects without ids of calls send none; an id that is sent must lead somewhere.
        if message.tool_call_id and message.tool_call_id not in called:
            raise _bad(f"{where}.tool_call_id", "is the id of no call in the messages before")
        if len(message.tool_calls) > MAX_CALLS:
            raise _bad(f"{where}.tool_calls", f"has {len(message.tool_calls)} entries, at most {MAX_CALLS} are allowed")
        ids = {call.id for call in message.tool_calls}
        if len(ids) != len(message.tool_calls):
            raise _bad(f"{where}.tool_calls", "has two calls with one id")
        called |= ids
        for number, call in enumerate(message.tool_calls):
            if not 1 <= len(call.id) <= MAX_CALL_ID_CHARS:
                raise _bad(f"{where}.tool_calls[{number}].id", f"must have 1 to {MAX_CALL_ID_CHARS} characters")
            if not NAME.fullmatch(call.name):
                raise _bad(f"{where}.tool_calls[{number}].name", f"must fit {NAME.pattern}")


def _check_tools(submit: Submit) -> None:
    if len(submit.tools) > MAX_TOOLS:
        raise _bad("tools", f"has {len(submit.tools)} entries, at most {MAX_TOOLS} are allowed")
    if submit.tools and submit.messages is None:
        raise _bad("tools", "need messages: a bare prompt has no place for them")
    values = 0
    for index, tool in enumerate(submit.tools):
        values += _check_tool(f"tools[{index}]", tool)
        if values > MAX_TOOL_VALUES:
            raise _bad("tools", f"hold more than {MAX_TOOL_VALUES} values together")
    names = {tool.name for tool in submit.tools}
    if len(names) != len(submit.tools):
        raise _bad("tools", "has two functions with one name")
    choice = submit.tool_choice
    if choice.startswith("function:"):
        if choice.removeprefix("function:") not in names:
            raise _bad("tool_choice", "names a function that is not among the tools")
    elif choice not in ("auto", "none", "required"):
        raise _bad("tool_choice", "must be auto, none, required or a function")
    elif choice == "required" and not submit.tools:
        raise _bad("tool_choice", "is required, and there are no tools")


def _check_tool(where: str, tool: Tool) -> int:
    """The number of values in its schema."""
    if not NAME.fullmatch(tool.name):
        raise _bad(f"{where}.name", f"must fit {NAME.pattern}")
    return _check_schema(f"{where}.parameters", tool.parameters)


def _check_schema(where: str, schema: dict[str, Any]) -> int:
    """Size and depth alone: whether it is a schema that can be held to is the engine's to say. Returns its values."""
    values = 0
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                inner.extend(value.values() if isinstance(value, dict) else value)
        values += len(level)
        if values + len(inner) > MAX_SCHEMA_VALUES:
            raise _bad(where, f"holds more than {MAX_SCHEMA_VALUES} values")
        if not inner:
            return values
        level = inner
    raise _bad(where, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _check_format(given: Format) -> None:
    match given.kind:
        case "json_object":
            if given.source:
                raise _bad("format.source", "must be empty for json_object")
        case "json_schema":
            _length("format.source", given.source, MAX_FORMAT_CHARS["json_schema"])
            try:
                schema = msgspec.json.decode(given.source)
            except (msgspec.DecodeError, RecursionError):
                raise _bad("format.source", "is not JSON") from None
            if not isinstance(schema, dict):
                raise _bad("format.source", "is not a JSON object")
            _check_schema("format.source", schema)
        case "regex":
            _length("format.source", given.source, MAX_FORMAT_CHARS["regex"])
        case "grammar":
            _length("format.source", given.source, MAX_FORMAT_CHARS["grammar"])


def _check_answers(submit: Submit) -> None:
    if not 1 <= submit.n <= MAX_ANSWERS:
        raise _bad("n", f"must be from 1 to {MAX_ANSWERS}, not {submit.n}")
    if submit.best_of != 1 and not submit.n <= submit.best_of <= MAX_ANSWERS:
        raise _bad("best_of", f"must be from n to {MAX_ANSWERS}, not {submit.best_of}")
    if not 0 <= submit.beam_width <= MAX_BEAMS:
        raise _bad("beam_width", f"must be from 0 (off) to {MAX_BEAMS}, not {submit.beam_width}")
    if submit.beam_width and submit.n > submit.beam_width:
        raise _bad("n", f"must be at most the beam_width of {submit.beam_width}")
    if submit.beam_width and submit.best_of > 1:
        raise _bad("best_of", "and beam_width exclude each other")
    if submit.logprobs is not None and not 0 <= submit.logprobs <= MAX_LOGPROBS:
        raise _bad("logprobs", f"must be from 0 to {MAX_LOGPROBS}, not {submit.logprobs}")


def _check_cache(submit: Submit) -> None:
    if submit.suffix is not None and submit.prompt is None:
        raise _bad("suffix", "needs a prompt of text")
    if len(submit.salt) > MAX_SALT_CHARS:
        raise _bad("salt", f"has {len(submit.salt)} characters, at most {MAX_SALT_CHARS} are allowed")
    if len(submit.keep) > MAX_KEEPS:
        raise _bad("keep", f"has {len(submit.keep)} entries, at most {MAX_KEEPS} are allowed")
    if submit.keep and submit.messages is None:
        raise _bad("keep", "needs messages")
    for keep in submit.keep:
        if not 0 <= keep.messages <= len(submit.messages or ()):
            raise _bad("keep", f"names {keep.messages} messages, there are {len(submit.messages or ())}")
        _within("keep.ttl_s", keep.ttl_s, 0.0, MAX_KEEP_S)


def _check_sampling(sampling: Sampling, context_tokens: int) -> None:
    if sampling.temperature is not None:
        _within("temperature", sampling.temperature, 0.0, MAX_PENALTY)
    if not 0 <= sampling.top_k <= MAX_TOKEN_ID:
        raise _bad("top_k", "must be 0 (off) or more")
    _within("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise _bad("top_p", "must be more than 0")
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_PENALTY)
    if sampling.repetition_penalty == 0.0:
        raise _bad("repetition_penalty", "must be more than 0; 1 is off")
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.seed is not None and not -MAX_SEED <= sampling.seed <= MAX_SEED:
        raise _bad("seed", "must fit into 64 bits")
    if len(sampling.stop) > MAX_STOPS:
        raise _bad("stop", f"has {len(sampling.stop)} entries, at most {MAX_STOPS} are allowed")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad("stop", f"entries have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= context_tokens:
        raise _bad(
            "max_tokens", f"must be from 1 to the model's context of {context_tokens} tokens, not {sampling.max_tokens}"
        )
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise _bad("logit_bias", f"has {len(sampling.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token <= MAX_TOKEN_ID:
            raise _bad("logit_bias", f"{token} is no token id")
        _within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _length(name: str, text: str, most: int) -> None:
    if not 1 <= len(text) <= most:
        raise _bad(name, f"must have 1 to {most} characters, not {len(text)}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise _bad(name, f"must be from {low:g} to {high:g}, not {value:g}")


def _bad(name: str, what: str) -> BadRequest:
    return BadRequest(f"{name} {what}", param=name)
