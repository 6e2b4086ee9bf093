"""Limits of a JSON body that no decoder has: how deep it is nested, how many values it holds.

A body of 32 MiB of `[[],[],...` would become gigabytes of lists, and one that is nested deeply costs the decoder its
stack. Looked at before anything is decoded, with operations on whole byte strings: some 10 ms per MiB, whatever is in
it. What it holds of brackets and quotes is bounded before anything goes through it one by one.
"""

from __future__ import annotations

from tierd.daemon.errors import BadRequest

MAX_DEPTH = 64
MAX_VALUES = 500_000
# Each costs time below; a body of text that is not made for it has fewer.
_MAX_QUOTES = 4 * MAX_VALUES
_MAX_ESCAPES = 16 * MAX_VALUES
_PART_BYTES = 64 << 10  # looked at together: what ends the look ends it early, and its pieces take little memory
_OPENING = frozenset(b"[{")
_NOT_STRUCTURE = bytes(sorted(set(range(256)) - set(b"[]{},")))


def check(body: bytes) -> None:
    """Raises BadRequest. What is no JSON at all may pass: the decoder tells that better."""
    if body.count(b'"') > _MAX_QUOTES or body.count(b"\\") > _MAX_ESCAPES:
        raise _too_many()
    # Escapes stand only in strings, and a run of backslashes begins with one: pairs go first, then escaped quotes.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = values = depth = 0  # inside: 1 in a string
    for start in range(0, len(text), _PART_BYTES):
        pieces = text[start : start + _PART_BYTES].split(b'"')  # inside and outside of strings by turns
        bare = b"".join(pieces[inside::2]).translate(None, delete=_NOT_STRUCTURE)
        inside ^= (len(pieces) - 1) & 1
        values += len(bare) - bare.count(b"]") - bare.count(b"}")
        if values > MAX_VALUES:
            raise _too_many()
        for byte in bare.translate(None, delete=b","):
            depth += 1 if byte in _OPENING else -1
            if depth < 0:
                return  # the decoder goes no further either
            if depth > MAX_DEPTH:
                raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _too_many() -> BadRequest:
    return BadRequest(f"the body holds more than {MAX_VALUES} values")
