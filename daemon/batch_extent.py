"""How large the requests of a batch are, before any is tokenized: what its block of sequences is planned by."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tierd.daemon.batch import Item
from tierd.daemon.plan.block import Extent

BYTES_PER_TOKEN = 4  # of English text, and of JSON around it; only what is planned depends on it
ANSWER_TOKENS = 256  # of a request that names no limit


class _Limits(msgspec.Struct):
    max_tokens: object = None
    max_completion_tokens: object = None


def extent_of(items: Iterable[Item]) -> Extent:
    """The extent of requests; those that are no generations count as prompts alone."""
    count = prompts = answers = longest = 0
    for item in items:
        limit = _limit(item)
        count += 1
        prompts += len(item.body)
        answers += limit
        longest = max(longest, len(item.body) + limit)  # a token is a byte at least
    if not count:
        return Extent(0, 0, 0, 0)
    return Extent(count, -(-prompts // (count * BYTES_PER_TOKEN)), -(-answers // count), longest)


def _limit(item: Item) -> int:
    """Tokens of an answer at most."""
    if item.url.endswith("/embeddings"):
        return 1
    try:
        given = msgspec.json.decode(item.body, type=_Limits)
    except (msgspec.DecodeError, UnicodeError):
        return ANSWER_TOKENS  # told when the request runs
    for limit in (given.max_completion_tokens, given.max_tokens):
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit
    return ANSWER_TOKENS
