"""JSON bodies of requests: decoded strictly, faults told by the name of the field. Shared by every dialect.

`reading` gets them from the client; here is no HTTP library, for files of requests have bodies, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from tierd.daemon.errors import BadRequest, Unsupported

_B = TypeVar("_B")


def decode(body: bytes, kind: type[_B]) -> _B:
    """A body as a struct. Raises BadRequest or Unsupported that names the field; no content is quoted."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise field_error(str(exc)) from None
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise BadRequest(f"the body is not valid JSON: {exc}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def raw(default: bytes) -> Any:
    """A field of undecoded JSON with a default, made by a factory: a schema has no words for a default of bytes."""
    return msgspec.field(default_factory=lambda: msgspec.Raw(default))


_AT = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(.*?)`")


def field_error(text: str) -> BadRequest:
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


def value_of(raw: bytes | msgspec.Raw) -> Any:
    """Any value that stands inside a body and was not looked at yet. Raises BadRequest."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadRequest("the body is not valid JSON") from None


def is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Whether a JSON value is one of these. 1 and 1.0 are the same; `True == 1` is a matter of Python."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


MAX_VALUE_BYTES = 64 << 10  # of a schema: a few levels of objects in 64 KiB are the most that anybody needs


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object that stands inside a body, such as a schema; not decoded at all when it is longer than 64 KiB.

    A body may have 32 MiB: of brackets alone that would become a gigabyte of lists. Raises BadRequest.
    """
    if len(raw) > MAX_VALUE_BYTES:
        raise BadRequest(f"{where} has {len(raw)} bytes, at most {MAX_VALUE_BYTES} are allowed", param=where)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise BadRequest(f"{where} is not valid JSON: {type(exc).__name__}", param=where) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    return value
