"""/v1/responses, inwards: JSON bodies to `Submit`. Pure: no I/O, no clock.

It is a chat with other names: items become messages, those of one turn of the model one message. What is stored of
earlier responses comes as messages from outside (`responses_store`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tierd.daemon import limits
from tierd.daemon.api import bodies, openai_fields
from tierd.daemon.api.openai import METADATA
from tierd.daemon.api.openai_types import Function
from tierd.daemon.api.responses_types import FlatTool, Item, ResponseRequest
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.protocol import Format, Message, Sampling, Submit, ToolCall

# Documented fields that tierd does not have, and the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
_METADATA = METADATA | {"client_metadata"}
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
# Of tools that do not exist here.
_INCLUDES_NOTHING = frozenset({
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
})  # fmt: skip
# Codex declares these whatever the model: the model is not told of them, and the client is told so.
LEFT_OUT = frozenset({"custom", "image_generation", "local_shell", "tool_search", "web_search", "web_search_preview"})
_TEXTS = frozenset({"input_text", "output_text", "text"})
_THOUGHTS = frozenset({"reasoning_text", "summary_text"})
_SEALED = "tierd1."


class Call(NamedTuple):
    """A request as the door wants it: `submit` without what earlier responses said."""

    given: ResponseRequest
    submit: Submit
    namespaces: Mapping[str, tuple[str, str]]  # the name of a function here: its namespace and its name there
    left_out: tuple[str, ...]  # types of tools that the model is not told of

    @property
    def messages(self) -> tuple[Message, ...]:
        """What this request adds to the conversation."""
        messages = self.submit.messages or ()
        return messages[1:] if self.given.instructions else messages

    def following(self, earlier: tuple[Message, ...]) -> Submit:
        """The whole request, after earlier messages. Instructions hold for one response and stand first."""
        system = (self.submit.messages or ())[: 1 if self.given.instructions else 0]
        messages = system + earlier + self.messages
        keep = tuple(msgspec.structs.replace(one, messages=len(messages)) for one in self.submit.keep)
        return msgspec.structs.replace(self.submit, messages=messages, keep=keep)


def parse(body: bytes) -> Call:
    """Raises BadRequest or Unsupported that names the field."""
    known = list(ResponseRequest.__struct_encode_fields__)
    openai_fields.check_unknown(bodies.decode(body, dict[str, msgspec.Raw]), known, _METADATA, NEUTRAL)
    given = bodies.decode(body, ResponseRequest)
    limits.check_count("tools", given.tools, limits.MAX_TOOLS)
    if isinstance(given.input, list):
        limits.check_count("input", given.input, 2 * limits.MAX_MESSAGES)  # thoughts and calls are items, too
    tools, namespaces, left_out = _tools(given.tools or ())
    messages = [Message("system", given.instructions)] if given.instructions else []
    if isinstance(given.input, str):
        messages.append(Message("user", given.input))
    else:
        messages += _Turns(given.input or (), namespaces).messages()
    options = given.prompt_cache_options
    ttl = options.ttl if options else None
    extra = {name: value for name in ("top_k", "top_p", "min_p") if (value := getattr(given, name)) is not None}
    submit = Submit(
        model=given.model,
        messages=tuple(messages),
        sampling=Sampling(
            temperature=given.temperature, seed=given.seed, max_tokens=given.max_output_tokens, **extra
        ),
        tools=tuple(openai_fields.tool(function) for function in tools),
        tool_choice=_choice(given.tool_choice, namespaces),
        parallel_tool_calls=given.parallel_tool_calls is not False,
        format=_format(given),
        thinking=openai_fields.thinking(given.reasoning.effort, "reasoning.effort") if given.reasoning else None,
        logprobs=_logprobs(given),
        keep=openai_fields.keep(given.prompt_cache_retention, ttl, 0),
        salt=given.cache_salt or "",
        kv_mode=given.kv_mode,
    )
    return Call(given, submit, namespaces, left_out)


def _logprobs(given: ResponseRequest) -> int | None:
    include = given.include or []
    for index, name in enumerate(include):
        if name not in (ENCRYPTED, LOGPROBS) and name not in _INCLUDES_NOTHING:
            raise Unsupported("this cannot be included", param=f"include[{index}]")
    return (given.top_logprobs or 0) if LOGPROBS in include or given.top_logprobs else None


def _format(given: ResponseRequest) -> Format | None:
    if given.text is None:
        return None
    if given.text.verbosity not in (None, "medium"):
        raise Unsupported("of verbosities there is only medium", param="text.verbosity")
    asked = given.text.format
    match asked.type if asked else "text":
        case "text":
            return None
        case "json_object":
            return Format("json_object")
        case "json_schema":
            return openai_fields.schema_format(asked.schema if asked else None, "text.format.schema")
        case _:
            raise Unsupported("text.format.type must be text, json_object or json_schema", param="text.format.type")


# -- tools ---------------------------------------------------------------------------------------------------------


def _tools(given: Iterable[FlatTool]) -> tuple[list[Function], dict[str, tuple[str, str]], tuple[str, ...]]:
    functions: list[Function] = []
    namespaces: dict[str, tuple[str, str]] = {}
    left_out: set[str] = set()
    for index, one in enumerate(given):
        where = f"tools[{index}]"
        if one.type == "function":
            functions.append(_function(where, one, one.name))
        elif one.type == "namespace" and one.name:
            for number, inner in enumerate(one.tools or ()):
                if inner.type != "function" or not inner.name:
                    left_out.add(inner.type)
                    continue
                name = _joined(one.name, inner.name)
                namespaces[name] = (one.name, inner.name)
                functions.append(_function(f"{where}.tools[{number}]", inner, name))
        elif one.type in LEFT_OUT:
            left_out.add(one.type)
        else:
            raise Unsupported("of the kinds of tools there is only function", param=f"{where}.type")
    return functions, namespaces, tuple(sorted(left_out))


def _function(where: str, given: FlatTool, name: str | None) -> Function:
    if name is None:
        raise BadRequest(f"{where}.name is missing", param=f"{where}.name")
    return Function(name, given.description, given.parameters, given.strict)


def _joined(namespace: str, name: str) -> str:
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def _choice(given: str | Mapping[str, Any] | None, namespaces: Mapping[str, tuple[str, str]]) -> str:
    choice = openai_fields.tool_choice(given)
    if isinstance(given, Mapping) and isinstance(namespace := given.get("namespace"), str):
        return "function:" + _joined(namespace, choice.removeprefix("function:"))
    return choice


# -- items ---------------------------------------------------------------------------------------------------------


class _Turns:
    """Items to messages: thinking, text and calls of one turn of the model are one message."""

    def __init__(self, items: Iterable[Item], namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._items = items
        self._there = {there: here for here, there in namespaces.items()}
        self._done: list[Message] = []
        self._text: str | None = None
        self._thinking: list[str] = []
        self._calls: list[ToolCall] = []

    def messages(self) -> list[Message]:
        """All of them. Raises BadRequest, Unsupported."""
        for index, item in enumerate(self._items):
            self._take(f"input[{index}]", item)
        self._end_turn()
        return self._done

    def _take(self, where: str, item: Item) -> None:
        match item.type:
            case "message":
                self._message(where, item)
            case "reasoning":
                if self._text is not None or self._calls:
                    self._end_turn()
                self._thinking.append(_thinking(where, item))
            case "function_call":
                if item.call_id is None or item.name is None:
                    raise BadRequest(f"{where} has no call_id or no name", param=where)
                name = self._there.get((item.namespace, item.name), item.name) if item.namespace else item.name
                self._calls.append(ToolCall(item.call_id, name, item.arguments or "{}"))
            case "function_call_output":
                self._end_turn()
                if item.call_id is None:
                    raise BadRequest(f"{where}.call_id is missing", param=f"{where}.call_id")
                text = openai_fields.text_of(item.output, f"{where}.output", _TEXTS)
                self._done.append(Message("tool", text, tool_call_id=item.call_id))
            case _:
                raise Unsupported(f"items of type {item.type[:64]!r} are not supported", param=f"{where}.type")

    def _message(self, where: str, item: Item) -> None:
        if isinstance(item.content, list):
            limits.check_count(f"{where}.content", item.content, limits.MAX_PARTS)
        if item.content is None:
            raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
        text = openai_fields.text_of(item.content, f"{where}.content", _TEXTS)
        if item.role == "assistant":
            if self._text is not None or self._calls:
                self._end_turn()
            self._text = text
            return
        self._end_turn()
        if item.role not in ("user", "system", "developer"):
            raise BadRequest(f"{where}.role must be user, assistant, system or developer", param=f"{where}.role")
        self._done.append(Message("user" if item.role == "user" else "system", text))

    def _end_turn(self) -> None:
        thinking = "".join(self._thinking)
        if self._text is not None or self._calls or thinking:
            calls = tuple(self._calls)
            self._done.append(Message("assistant", self._text or "", thinking=thinking, tool_calls=calls))
        self._text, self._thinking, self._calls = None, [], []


def _thinking(where: str, item: Item) -> str:
    """What was thought: as content, else as we sealed it, else as the summary."""
    if item.content:
        return openai_fields.text_of(item.content, f"{where}.content", _THOUGHTS)
    return unseal(item.encrypted_content or "") or openai_fields.text_of(item.summary, f"{where}.summary", _THOUGHTS)


def seal(thinking: str) -> str:
    """Thinking for `encrypted_content`: clients keep it unseen and send it back."""
    return _SEALED + base64.b64encode(thinking.encode()).decode()


def unseal(sealed: str) -> str:
    """The opposite; empty for what another server sealed."""
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
