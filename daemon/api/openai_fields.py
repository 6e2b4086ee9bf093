"""Fields that chat completions, completions and responses have in common, as parts of a `Submit`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tierd.daemon import limits
from tierd.daemon.api.bodies import is_one_of, value_of
from tierd.daemon.api.openai_types import Function, Part
from tierd.daemon.errors import BadRequest, Unsupported, suggest
from tierd.daemon.protocol import Format, Keep, Tool

_NEUTRAL_BYTES = 64  # longer values ask for something, and are not even decoded
_EFFORTS = {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
_KEPT_S = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}
_NOT_KEPT = ("in_memory", "in-memory")


def check_unknown(
    fields: Mapping[str, msgspec.Raw],
    known: Iterable[str],
    ignored: frozenset[str],
    neutral: Mapping[str, Iterable[Any]],
) -> None:
    """Raises Unsupported for a field that would change the answer and that does not exist here.

    `ignored`: fields that only describe the request. `neutral`: fields tierd does not have, with the values that ask
    for nothing, which null always does.
    """
    limits.check_count("the body", fields, limits.MAX_FIELDS)
    known = set(known)
    for name, raw in fields.items():
        if name in known or name in ignored:
            continue
        value = value_of(raw) if len(bytes(raw)) <= _NEUTRAL_BYTES else raw
        if value is None:
            continue
        if name not in neutral:
            hint = suggest(name[:64], sorted(known))
            raise Unsupported(f"unknown field {name[:64]!r}", hint=hint, param=name[:64])
        if not is_one_of(value, neutral[name]):
            raise Unsupported(f"{name} is not supported", param=name)


def text_of(content: str | list[Part] | None, where: str, kinds: frozenset[str] = frozenset({"text"})) -> str:
    """The text of a message. Raises Unsupported for images, files and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in kinds or part.text is None:
            what = " or ".join(sorted(kinds))
            raise Unsupported(f"only content of type {what} is supported", param=f"{where}[{number}]")
        texts.append(part.text)
    return "\n".join(texts)


def schema_format(schema: Mapping[str, Any] | None, where: str) -> Format:
    """What holds an answer to a schema."""
    if schema is None:
        raise BadRequest(f"{where} is missing", param=where)
    return Format("json_schema", msgspec.json.encode(schema).decode())


def tool(function: Function) -> Tool:
    """A function as the engine wants it; without parameters it takes none."""
    parameters = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def tool_choice(given: str | Mapping[str, Any] | None) -> str:
    """`auto`, `none`, `required`, or `function:NAME`, from either spelling of a named function."""
    if given is None:
        return "auto"
    if isinstance(given, str):
        return given
    if given.get("type") != "function":
        raise Unsupported("of the kinds of tool_choice there is only function", param="tool_choice.type")
    inner = given.get("function", given)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise BadRequest("tool_choice names no function", param="tool_choice.function.name")
    return f"function:{name}"


def thinking(effort: str | None, where: str) -> bool | None:
    """Efforts are on or off here: a model thinks or does not."""
    if effort is None:
        return None
    if effort not in _EFFORTS:
        raise BadRequest(f"{where} must be one of {', '.join(_EFFORTS)}", param=where)
    return _EFFORTS[effort]


def keep(retention: str | None, ttl: str | None, messages: int) -> tuple[Keep, ...]:
    """A wish that the whole prompt stay cached."""
    for where, value in (("prompt_cache_retention", retention), ("prompt_cache_options.ttl", ttl)):
        if value is None or value in _NOT_KEPT:
            continue
        if value not in _KEPT_S:
            raise BadRequest(f"{where} must be one of {', '.join((*_NOT_KEPT, *_KEPT_S))}", param=where)
        return (Keep(messages, _KEPT_S[value]),)
    return ()
