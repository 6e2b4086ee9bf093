"""Limits of a JSON body that no decoder has: how deep it is nested, how many values it holds.

A body of 32 MiB of `[[],[],...` would become gigabytes of lists, and one that is nested deeply costs the decoder its
stack. Looked at before anything is decoded, with operations on whole byte strings: some 10 ms per MiB of text.
"""

from __future__ import annotations

import re

from tierd.daemon.errors import BadRequest

MAX_DEPTH = 64
MAX_VALUES = 500_000
# Each costs time below; a body of text that is not made for it has fewer.
_MAX_QUOTES = 4 * MAX_VALUES
_MAX_ESCAPES = 16 * MAX_VALUES
_STRING = re.compile(rb'"[^"]*+"')
_OPENING = frozenset(b"[{")
_NOT_STRUCTURE = bytes(sorted(set(range(256)) - set(b"[]{},")))


def check(body: bytes) -> None:
    """Raises BadRequest. What is no JSON at all may pass: the decoder tells that better."""
    if body.count(b'"') > _MAX_QUOTES or body.count(b"\\") > _MAX_ESCAPES:
        raise _too_many()
    # Escapes stand only in strings, and a run of backslashes begins with one: pairs go first, then escaped quotes.
    bare = _STRING.sub(b"", body.replace(b"\\\\", b"").replace(b'\\"', b"")) if b'"' in body else body
    bare = bare.translate(None, delete=_NOT_STRUCTURE)
    if len(bare) - bare.count(b"]") - bare.count(b"}") > MAX_VALUES:
        raise _too_many()
    depth = 0
    for byte in bare.translate(None, delete=b","):
        depth += 1 if byte in _OPENING else -1
        if depth > MAX_DEPTH:
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _too_many() -> BadRequest:
    return BadRequest(f"the body holds more than {MAX_VALUES} values")
