"""Names of pages: a chain of digests, so that a key stands for every token from the start of the sequence.

    root   = blake2b-128(namespace text)            weights, tokenizer, layout, format, RoPE, adapter: a doubt is a miss
    salted = blake2b-128(root, salt)                another personalization: a salt can't imitate a page
    page   = blake2b-128(parent key, token ids)     ids as little-endian uint32

The digests are the same in every process and on every machine (no `hash()`, no byte order of the machine). A partial
page is named like a full one; the number of its tokens is part of what is hashed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from tierd.tiers.page import PageKey

KEY_BYTES = 16
TOKEN_BYTES = 4


def root_key(namespace: str) -> PageKey:
    """The key before the first page of every unsalted sequence of this namespace."""
    return PageKey(blake2b(namespace.encode(), digest_size=KEY_BYTES, person=b"tierd-root").digest())


def salted_root(root: PageKey, salt: bytes) -> PageKey:
    """The root for one tenant. An empty salt is the root itself; two different salts never share a page."""
    if not salt:
        return root
    return PageKey(blake2b(root + salt, digest_size=KEY_BYTES, person=b"tierd-salt").digest())


def page_key(parent: PageKey, packed: bytes) -> PageKey:
    """The key of the page that holds `packed` tokens (see `pack_tokens`) after `parent`."""
    return PageKey(blake2b(parent + packed, digest_size=KEY_BYTES).digest())


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, 4 bytes each. Raises ValueError for an id that does not fit."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"a token id is not an unsigned 32-bit integer: {error}") from None


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two packed runs share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit // TOKEN_BYTES
    count = 0
    while left[count : count + TOKEN_BYTES] == right[count : count + TOKEN_BYTES]:
        count += TOKEN_BYTES
    return count // TOKEN_BYTES
