"""The Ollama dialect, inwards: bodies of /api/chat and /api/generate to `Submit`. Pure.

A field or an option that would change the answer and that tierd does not have is refused by name. Options that only
place the model or tune Ollama's own engine (`num_gpu`, `num_thread`, ...) are accepted and have no effect: where a
model lies is for the planner of the daemon to say, and no token depends on it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tierd.daemon import limits
from tierd.daemon.api.bodies import decode, field_error, is_one_of, json_object, raw, value_of
from tierd.daemon.errors import BadRequest, Unsupported, suggest
from tierd.daemon.generation import Format, Message, Sampling, Submit, Tool, ToolCall

LATEST = ":latest"
FOREVER = None
# They say where and how fast a model runs in Ollama's engine, and change no token. `num_keep` is about what stays when
# a context is cut, which never happens here.
PLACEMENT = frozenset(
    {"num_gpu", "main_gpu", "num_thread", "num_batch", "num_keep", "low_vram", "numa", "use_mmap", "use_mlock",
     "f16_kv", "vocab_only", "logits_all", "embedding_only"}
)  # fmt: skip
# Options that tierd does not have, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,), "penalize_newline": (True,),
}  # fmt: skip
_DURATION = re.compile(r"(-?)((?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+|[0-9]+(?:\.[0-9]+)?)")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = raw(b"null")


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Called(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = raw(b"{}")


class _ToolCall(msgspec.Struct):
    function: _Called
    id: str | None = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # an older spelling of tool_name


class _Options(msgspec.Struct):
    """Those that mean something; the others are looked at by name."""

    num_ctx: int | None = None
    num_predict: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    kv_mode: str | None = None  # not of Ollama: what is kept of the context
    mirostat_tau: float | None = None  # they tune mirostat, which has to be off
    mirostat_eta: float | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    stream: bool | None = None
    options: dict[str, msgspec.Raw] | None = None
    format: msgspec.Raw = raw(b"null")
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None  # to cut a prompt that is too long; here it is refused
    shift: bool | None = None  # to forget the beginning when the context is full; here the answer ends


class OllamaChat(_Common, kw_only=True):
    messages: list[_Turn] | None = None
    tools: list[_Tool] | None = None


class OllamaGenerate(_Common, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


_B = TypeVar("_B", OllamaChat, OllamaGenerate)
Duration = float | None  # seconds; None: for ever


class Call(NamedTuple):
    """A request as the routes want it."""

    model: str  # as the client spells it: the answer repeats it
    submit: Submit | None  # None: nothing is asked, the model is only to be loaded, or unloaded
    stream: bool
    keep_alive: tuple[Duration] | None  # None: nothing was said


def model_name(ref: str) -> str:
    """What Ollama calls `name:latest` is `name` here."""
    return ref.removesuffix(LATEST)


def parse_chat(body: bytes) -> Call:
    """The body of /api/chat. Raises BadRequest or Unsupported that names the field."""
    given = decode(body, OllamaChat)
    if not given.messages:
        return _call(given, None)
    limits.check_count("messages", given.messages, limits.MAX_MESSAGES)
    limits.check_count("tools", given.tools, limits.MAX_TOOLS)
    messages = tuple(_messages(given.messages))
    tools = tuple(_tool(index, tool) for index, tool in enumerate(given.tools or ()))
    return _call(given, _submit(given, messages=messages, tools=tools))


def parse_generate(body: bytes) -> Call:
    """The body of /api/generate."""
    given = decode(body, OllamaGenerate)
    if given.images:
        raise Unsupported("images are not supported", param="images")
    if given.template:
        raise Unsupported("template is not supported: a model is asked with its own", param="template", hint=_RAW_HINT)
    if not given.prompt:
        return _call(given, None)
    if given.raw or given.suffix:
        for name in ("system", "context"):
            if getattr(given, name):
                other = "raw" if given.raw else "suffix"
                raise BadRequest(f"{name} and {other} exclude each other: that prompt is taken as it is", param=name)
        return _call(given, _submit(given, prompt=given.prompt, suffix=given.suffix or None))
    system = [Message("system", given.system)] if given.system else []
    messages = (*system, Message("user", given.prompt))
    # The answer ends with the tokens of the whole conversation, for the next request.
    return _call(given, _submit(given, messages=messages, before=tuple(given.context or ()), tell_prompt=True))


_RAW_HINT = "write the whole prompt yourself and set raw"


def _call(given: _Common, submit: Submit | None) -> Call:
    keep = None if given.keep_alive is None else (duration_s(given.keep_alive),)
    return Call(given.model, submit, given.stream is not False, keep)


def duration_s(value: float | str) -> Duration:
    """`keep_alive`: seconds as a number, or a duration as Go writes it (`5m`, `1h30m`); below zero is for ever."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        if found is None:
            raise BadRequest("keep_alive must be seconds or a duration such as 5m, 0 or -1", param="keep_alive")
        parts = _PART.findall(found[2])
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(found[2])
        value = -seconds if found[1] else seconds
    return FOREVER if value < 0 else min(value, 1e9)


def _submit(given: _Common, **what: Any) -> Submit:
    sampling, options = _sampling(given.options or {})
    for name in ("truncate", "shift"):
        if getattr(given, name):
            raise Unsupported(f"{name} is not supported: no context is cut", param=name)
    if isinstance(given.think, str):
        raise Unsupported("think must be true or false: levels are not supported", param="think")
    logprobs = None
    if given.logprobs or given.top_logprobs:
        logprobs = given.top_logprobs or 0
    return Submit(
        model=model_name(given.model), sampling=sampling, ctx=options.num_ctx, kv_mode=options.kv_mode,
        format=_format(bytes(given.format)),
        thinking=given.think, logprobs=logprobs, **what,
    )  # fmt: skip


def _sampling(options: Mapping[str, msgspec.Raw]) -> tuple[Sampling, _Options]:
    """The options: as sampling, and all of them."""
    limits.check_count("options", options, limits.MAX_FIELDS)
    known = _Options.__struct_fields__
    for name, value in options.items():
        if name not in known:
            _check_other(name, bytes(value), known)
    try:
        given = msgspec.json.decode(msgspec.json.encode({n: options[n] for n in known if n in options}), type=_Options)
    except msgspec.ValidationError as exc:
        error = field_error(str(exc))
        raise BadRequest(f"options.{error.message}", param=f"options.{error.param}") from None
    if given.repeat_last_n not in (None, -1) and given.repeat_penalty not in (None, 1.0):
        raise Unsupported(
            "options.repeat_last_n is not supported: the penalty looks at the whole context",
            hint="leave it out, or set -1", param="options.repeat_last_n",
        )  # fmt: skip
    stop = given.stop if isinstance(given.stop, list) else [given.stop] if given.stop else []
    return Sampling(
        temperature=given.temperature,
        top_k=given.top_k or 0,
        top_p=1.0 if given.top_p is None else given.top_p,
        min_p=given.min_p or 0.0,
        repetition_penalty=1.0 if given.repeat_penalty is None else given.repeat_penalty,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=None if given.seed is None or given.seed < 0 else given.seed,
        stop=tuple(stop),
        max_tokens=None if given.num_predict is None or given.num_predict < 0 else given.num_predict,
    ), given


def _check_other(name: str, raw: bytes, known: Sequence[str]) -> None:
    where = f"options.{name[:64]}"
    if name in PLACEMENT:
        return
    value = value_of(raw) if len(raw) <= 64 else raw
    if value is None:
        return
    if name not in _NEUTRAL:
        raise Unsupported(f"unknown option {where}", hint=suggest(name[:64], [*known, *PLACEMENT]), param=where)
    if not is_one_of(value, _NEUTRAL[name]):
        raise Unsupported(f"{where} is not supported", param=where)


def _format(raw: bytes) -> Format | None:
    if raw.strip() in (b"null", b'""'):
        return None
    if raw.strip() == b'"json"':
        return Format("json_object")
    if not raw.lstrip().startswith(b"{"):
        raise Unsupported('format must be "json" or a JSON schema', param="format")
    json_object(raw, "format")
    return Format("json_schema", raw.decode())


def _tool(index: int, tool: _Tool) -> Tool:
    where = f"tools[{index}]"
    if tool.type != "function":
        raise Unsupported(f"{where}: only tools of type function are supported", param=f"{where}.type")
    raw = bytes(tool.function.parameters)
    schema = {} if raw == b"null" else json_object(raw, f"{where}.function.parameters")
    return Tool(tool.function.name, tool.function.description or "", schema)


def _messages(turns: Sequence[_Turn]) -> list[Message]:
    """Calls get ids, which this dialect lacks: a tool's turn answers the first call of its name that has none yet."""
    messages: list[Message] = []
    open_calls = _OpenCalls()
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.images:
            raise Unsupported(f"{where}.images: images are not supported", param=f"{where}.images")
        limits.check_count(f"{where}.tool_calls", turn.tool_calls, limits.MAX_CALLS)
        calls = tuple(_called(where, index, place, call) for place, call in enumerate(turn.tool_calls or ()))
        text, thinking = turn.content or "", turn.thinking or ""
        if turn.role == "tool":
            call = open_calls.answered(where, turn)
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        else:
            open_calls.add(calls)
            messages.append(Message(turn.role, text, thinking, calls))
    return messages


def _called(where: str, index: int, place: int, call: _ToolCall) -> ToolCall:
    arguments = bytes(call.function.arguments).decode("utf-8", "replace")
    if not arguments.startswith("{"):
        at = f"{where}.tool_calls[{place}].function.arguments"
        raise BadRequest(f"{at} must be an object", param=at)
    return ToolCall(call.id or f"call_{index}_{place}", call.function.name, arguments)


class _OpenCalls:
    """Calls without an answer, found by id or by name, each in a few steps: there may be many thousands of them."""

    def __init__(self) -> None:
        self._known: list[ToolCall] = []
        self._open: set[int] = set()  # places in it
        self._queues: dict[tuple[str, str], deque[int]] = {}  # the same, those that were answered included

    def add(self, calls: Sequence[ToolCall]) -> None:
        """Calls of the assistant, in their order. Raises BadRequest when there are more than could be answered."""
        if len(self._known) + len(calls) > limits.MAX_MESSAGES:
            raise BadRequest(f"messages hold more than {limits.MAX_MESSAGES} calls", param="messages")
        for call in calls:
            self._open.add(len(self._known))
            for key in (("id", call.id), ("name", call.name), ("any", "")):
                self._queues.setdefault(key, deque()).append(len(self._known))
            self._known.append(call)

    def answered(self, where: str, turn: _Turn) -> ToolCall:
        """The first of those that a tool's turn may mean. Raises BadRequest."""
        name = turn.tool_name or turn.name
        key = ("id", turn.tool_call_id) if turn.tool_call_id else ("any", "") if name is None else ("name", name)
        queue = self._queues.get(key, deque())
        while queue:
            if (place := queue.popleft()) in self._open:
                self._open.remove(place)
                return self._known[place]
        raise BadRequest(f"{where}: no call before it is answered by this turn", param=where, hint=_TOOL_HINT)


_TOOL_HINT = "send the assistant's turn with its tool_calls first, and tool_name as the function is called"
