"""The Anthropic dialect, inwards: bodies of /v1/messages to `Submit`. Pure.

Unknown fields of a body are skipped, as Anthropic's gateways are asked to: its clients send new ones with every
release. A field that is known to change the answer and that tierd does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tierd.daemon import limits
from tierd.daemon.api.bodies import decode, json_object, raw
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.generation import Format, Keep, Message, Sampling, Submit, Tool, ToolCall

MAX_BREAKPOINTS = 4
TTL_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
ATTRIBUTION = "x-anthropic-"  # lines of a system prompt that name the client and differ in every request
# Blocks that only Anthropic's own servers can serve, and pictures and files, are refused; these are what tierd reads.
_CALLED_TYPES = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class _CacheControl(msgspec.Struct):
    type: str = "ephemeral"
    ttl: str = "5m"


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    cache_control: _CacheControl | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = raw(b"{}")
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None
    is_error: bool | None = None


class _Turn(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = raw(b"")
    cache_control: _CacheControl | None = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str
    display: str | None = None


class _OutputFormat(msgspec.Struct):
    type: str
    schema: msgspec.Raw = raw(b"")


class _OutputConfig(msgspec.Struct):
    format: _OutputFormat | None = None


class CountTokens(msgspec.Struct):
    """The body of count_tokens."""

    model: str
    messages: list[_Turn]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    cache_control: _CacheControl | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None  # an older name of the same
    mcp_servers: msgspec.Raw = raw(b"null")
    container: msgspec.Raw = raw(b"null")


class CreateMessage(CountTokens, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class Call(NamedTuple):
    """A request as the routes want it."""

    submit: Submit
    stream: bool
    max_tokens: int  # as asked for; 0: the prompt is only put into the cache
    hide_thinking: bool  # thinking blocks are sent empty
    dropped_attribution: bool


def parse_messages(body: bytes, *, strip_attribution: bool) -> Call:
    """The body of /v1/messages. Raises BadRequest or Unsupported that names the field."""
    given = decode(body, CreateMessage)
    if given.max_tokens < 0:
        raise BadRequest("max_tokens must be 0 or more", param="max_tokens")
    sampling = Sampling(
        temperature=given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        stop=tuple(given.stop_sequences or ()),
        max_tokens=max(1, given.max_tokens),
    )
    submit, dropped = _submit(given, sampling, strip_attribution=strip_attribution)
    hide = given.thinking is not None and given.thinking.display == "omitted"
    return Call(submit, bool(given.stream), given.max_tokens, hide, dropped)


def parse_count(body: bytes, *, strip_attribution: bool) -> Submit:
    """The body of /v1/messages/count_tokens as the request whose prompt is to be counted."""
    return _submit(decode(body, CountTokens), Sampling(), strip_attribution=strip_attribution)[0]


def _submit(given: CountTokens, sampling: Sampling, *, strip_attribution: bool) -> tuple[Submit, bool]:
    for name in ("mcp_servers", "container"):
        if bytes(getattr(given, name)).strip() not in (b"null", b"[]"):
            raise Unsupported(f"{name} is not supported", param=name)
    limits.check_count("messages", given.messages, limits.MAX_MESSAGES)
    limits.check_count("tools", given.tools, limits.MAX_TOOLS)
    breakpoints = _Breakpoints()
    tools = tuple(_tool(index, tool, breakpoints) for index, tool in enumerate(given.tools or ()))
    history = _History(breakpoints)
    dropped = history.add_system(given.system, strip=strip_attribution)
    for index, turn in enumerate(given.messages):
        history.add_turn(f"messages[{index}]", turn)
    if not given.messages:
        raise BadRequest("messages is empty", param="messages")
    if given.messages[-1].role == "assistant":
        raise Unsupported(
            "the last message is the assistant's: to go on in its words (prefill) is not supported", param="messages"
        )
    if given.cache_control is not None:
        breakpoints.add("cache_control", given.cache_control, history.count, automatic=True)
    choice, parallel = _choice(given.tool_choice, tools)
    submit = Submit(
        model=given.model,
        messages=history.messages(),
        sampling=sampling,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        format=_format(given),
        thinking=_thinking(given.thinking),
        keep=tuple(breakpoints.keep),
    )
    return submit, dropped


class _Breakpoints:
    """The `cache_control` marks in the order of the prompt: tools, system, messages."""

    def __init__(self) -> None:
        self.keep: list[Keep] = []

    def add(self, where: str, mark: _CacheControl | None, messages: int, *, automatic: bool = False) -> None:
        """A mark behind so many messages. Raises BadRequest."""
        if mark is None:
            return
        if mark.type != "ephemeral" or mark.ttl not in TTL_S:
            raise BadRequest(f"{where} must be of type ephemeral with a ttl of 5m or 1h", param=where)
        keep = Keep(messages, TTL_S[mark.ttl])
        if automatic and self.keep and self.keep[-1] == keep:
            return  # the last block has the mark already
        if self.keep and self.keep[-1].ttl_s < keep.ttl_s:
            raise BadRequest("a cache_control with ttl 1h must not come after one with ttl 5m", param=where)
        if len(self.keep) == MAX_BREAKPOINTS:
            raise BadRequest(f"there are more than {MAX_BREAKPOINTS} blocks with cache_control", param=where)
        self.keep.append(keep)


class _Open:
    """A message that may still grow. Joined once, at its end: a body may have a hundred thousand parts."""

    def __init__(self, begun: Message) -> None:
        self._begun = begun
        self._parts = [begun]

    def add(self, more: Message) -> bool:
        """What comes after it; false when that is a message of its own."""
        if more.role != self._begun.role or more.role == "tool":
            return False
        self._parts.append(more)
        return True

    def message(self) -> Message:
        """All of it."""
        if len(self._parts) == 1:
            return self._begun
        # An answer was told as one text, cut by its calls.
        between = "" if self._begun.role == "assistant" else "\n"
        return Message(
            self._begun.role,
            between.join(part.content for part in self._parts),
            "".join(part.thinking for part in self._parts),
            tuple(call for part in self._parts for call in part.tool_calls),
        )


class _History:
    """Turns of blocks to `Message`s. Consecutive turns of one role are one turn, as Anthropic has it."""

    def __init__(self, breakpoints: _Breakpoints) -> None:
        self._turns: list[_Open] = []
        self._breakpoints = breakpoints
        self._calls: dict[str, str] = {}  # name of the function by the id of its call

    @property
    def count(self) -> int:
        """Messages so far."""
        return len(self._turns)

    def messages(self) -> tuple[Message, ...]:
        """They."""
        return tuple(turn.message() for turn in self._turns)

    def add_system(self, system: str | list[_Block] | None, *, strip: bool) -> bool:
        """The system prompt; whether a part of it was attribution and was dropped."""
        if system is None:
            return False
        blocks = [_Block("text", system)] if isinstance(system, str) else system
        texts, dropped, marks = [], False, []
        for index, block in enumerate(blocks):
            where = f"system[{index}]"
            if block.type != "text" or block.text is None:
                raise Unsupported(f"{where}: only text is supported, not {block.type[:64]!r}", param=where)
            text = without_attribution(block.text) if strip else block.text
            dropped |= text != block.text
            if text:
                texts.append(text)
            marks.append((f"{where}.cache_control", block.cache_control))
        if texts:
            self._turns.append(_Open(Message("system", "\n".join(texts))))
        for where, mark in marks:
            self._breakpoints.add(where, mark, self.count)
        return dropped

    def add_turn(self, where: str, turn: _Turn) -> None:
        """One entry of `messages`. Raises BadRequest, Unsupported."""
        if turn.role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
        blocks = [_Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
        limits.check_count(f"{where}.content", blocks, limits.MAX_PARTS)
        if turn.role == "assistant":
            self._push(self._assistant(where, blocks))
        for index, block in enumerate(blocks):
            at = f"{where}.content[{index}]"
            if turn.role != "assistant":
                self._push(self._others(at, turn.role, block))
            self._breakpoints.add(f"{at}.cache_control", block.cache_control, self.count)

    def _push(self, message: Message) -> None:
        if not self._turns or not self._turns[-1].add(message):
            self._turns.append(_Open(message))

    def _assistant(self, where: str, blocks: Sequence[_Block]) -> Message:
        texts, thinking, calls = [], [], []
        for index, block in enumerate(blocks):
            at = f"{where}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(_needed(block.text, f"{at}.text"))
                case "thinking":
                    thinking.append(_needed(block.thinking, f"{at}.thinking"))
                case "redacted_thinking":
                    pass  # nobody can read it
                case "tool_use":
                    calls.append(self._call(at, block))
                case _:
                    raise _refused(at, block.type)
        return Message("assistant", "".join(texts), "".join(thinking), tuple(calls))

    def _call(self, at: str, block: _Block) -> ToolCall:
        call_id, name = _needed(block.id, f"{at}.id"), _needed(block.name, f"{at}.name")
        arguments = bytes(block.input).decode("utf-8", "replace")
        if not arguments.startswith("{"):
            raise BadRequest(f"{at}.input must be an object", param=f"{at}.input")
        self._calls[call_id] = name
        return ToolCall(call_id, name, arguments)

    def _others(self, at: str, role: str, block: _Block) -> Message:
        if block.type == "text":
            return Message(role, _needed(block.text, f"{at}.text"))
        if block.type != "tool_result" or role != "user":
            raise _refused(at, block.type)
        call_id = _needed(block.tool_use_id, f"{at}.tool_use_id")
        if call_id not in self._calls:
            raise BadRequest(f"{at}: no tool_use before it has this id", param=f"{at}.tool_use_id")
        text = _result_text(at, block.content)
        if block.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}" if text else "Error"
        return Message("tool", text, tool_call_id=call_id, name=self._calls[call_id])


def without_attribution(text: str) -> str:
    """A system text without the lines at its beginning that only name the client.

    One of them changes with every request and would make every cached prefix useless.
    """
    place = 0
    while text.startswith(ATTRIBUTION, place):
        place = text.find("\n", place) + 1
        if not place:
            return ""
    return text[place:]


def _result_text(at: str, content: str | list[_Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _refused(f"{at}.content[{index}]", block.type)
        texts.append(_needed(block.text, f"{at}.content[{index}].text"))
    return "\n".join(texts)


def _refused(at: str, kind: str) -> BadRequest:
    if kind in _CALLED_TYPES:
        return BadRequest(f"{at}: a block of type {kind} has no place here", param=at)
    return Unsupported(f"{at}: blocks of type {kind[:64]!r} are not supported", param=at)


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise BadRequest(f"{where} is missing", param=where)
    return value


def _tool(index: int, tool: _Tool, breakpoints: _Breakpoints) -> Tool:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise Unsupported(f"{where}: tools of type {tool.type[:64]!r} are not supported", param=f"{where}.type")
    raw = bytes(tool.input_schema)
    if not raw:
        raise BadRequest(f"{where}.input_schema is missing", param=f"{where}.input_schema")
    breakpoints.add(f"{where}.cache_control", tool.cache_control, 0)
    schema: dict[str, Any] = json_object(raw, f"{where}.input_schema")
    return Tool(tool.name, tool.description or "", schema, bool(tool.strict))


def _choice(choice: _ToolChoice | None, tools: Sequence[Tool]) -> tuple[str, bool]:
    """`tool_choice` of a `Submit`, and whether several calls may be made."""
    if choice is None:
        return "auto", True
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none":
            return choice.type, parallel
        case "any" if tools:
            return "required", parallel
        case "tool" if choice.name in [tool.name for tool in tools]:
            return f"function:{choice.name}", parallel
        case "any" | "tool":
            raise BadRequest("tool_choice asks for a tool that tools does not have", param="tool_choice")
        case _:
            raise BadRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")


def _format(given: CountTokens) -> Format | None:
    wanted = given.output_format or (given.output_config.format if given.output_config else None)
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise Unsupported("output_config.format must be of type json_schema", param="output_config.format.type")
    schema = bytes(wanted.schema)
    json_object(schema or b"null", "output_config.format.schema")
    return Format("json_schema", schema.decode())


def _thinking(wanted: _Thinking | None) -> bool | None:
    """`adaptive`, and saying nothing, leave it to the model."""
    if wanted is None or wanted.type == "adaptive":
        return None
    if wanted.type not in ("enabled", "between_tools", "disabled"):
        raise BadRequest("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    return wanted.type != "disabled"
