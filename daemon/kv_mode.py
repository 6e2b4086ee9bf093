"""Memory modes: what a request may give up of its context, or keep exact of it. Pure, no arrays.

`exact` keeps all. `window=N`: a token sees itself and the N - 1 before it. `sinks=S,window=W` (StreamingLLM, arXiv
2309.17453): it sees the first S tokens, too, as if everything between them and the window had never been; then there
is no end to the text. `select=K` (Quest, arXiv 2406.10774): all is kept, and a token of the answer reads in each layer
only the K pages that its query may weigh most. What a mode has not changed yet is exact: the first `exact_tokens` of a
sequence, and with `select` its prompt, are those of any other request, and their pages are shared.

`exact_first=F,exact_last=L` is for a daemon whose pages are packed: a token sees the first F tokens and those of its
own block of L as they are, and the others packed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierd.daemon.errors import BadRequest, suggest

EXACT = "exact"
_OFF = ("", EXACT, "none")
BASE_TOKENS = 256  # as in `kernels.rows`
PAGE_TOKENS = 16  # as in `kernels.layout`
MIN_WINDOW_TOKENS = PAGE_TOKENS  # less would save nothing
MIN_SELECTED = 4  # pages: the first, the newest two, and one that is chosen
MAX_SELECTED = 1 << 20
MAX_TOKENS = 1 << 24
MAX_CHARS = 64
LADDER_STEP = 32  # as in `kernels.rows`
MAX_LADDER_TOKENS = 1 << 16
_HINT = f"window=N or sinks=S,window=W, in tokens; select=K, in pages; or {EXACT!r} for the whole context"
_NAMES = ("window", "sinks", "select", "exact_first", "exact_last")


@dataclass(frozen=True, slots=True)
class KvMode:
    """What rows of a sequence see: `window` tokens up to their own, and the first `sinks` of all; or, in each layer,
    the `read` tokens of the pages that they choose. Or all, of which `exact_first` and a block of `exact_last` are
    exact where pages are packed."""

    window: int = 0
    sinks: int = 0
    read: int = 0
    exact_first: int = 0
    exact_last: int = 0

    def __str__(self) -> str:
        if self.exact_last:
            return f"exact_first={self.exact_first},exact_last={self.exact_last}"
        if self.selects:
            return f"select={self.read // PAGE_TOKENS}"
        return f"sinks={self.sinks},window={self.window}" if self.sinks else f"window={self.window}"

    @property
    def selects(self) -> bool:
        """Whether all pages are kept, and rows choose which of them they read."""
        return self.read > 0

    @property
    def exact_tokens(self) -> int:
        """So many first tokens of a sequence see all before them: their keys and values are the exact ones."""
        return self.read or self.sinks + self.window

    @property
    def endless(self) -> bool:
        """Whether the model's context bounds what a token sees, and not how long the text is."""
        return self.sinks > 0

    def first_seen(self, position: int) -> int:
        """The first token, sinks apart, that a row at this position sees."""
        return position - self.window + 1 if position >= self.exact_tokens else 0

    def bound(self, start: int, page_tokens: int) -> tuple[int, int, int, int]:
        """The fields of a `kernels.rows.Bound` for rows from `start` on: window, sinks, pages with sinks, and the token
        from which on they are given pages."""
        base = self.first_seen(start) // BASE_TOKENS * BASE_TOKENS
        return self.window, self.sinks, -(-self.sinks // page_tokens), base

    def most_tokens(self, rows: int) -> int:
        """How many tokens' pages a sequence has at once at most, if steps have up to `rows` of its rows.

        Those that are exact stay together until none but the sinks are seen any more.
        """
        return self.exact_tokens + self.window + rows


def parse(text: str) -> KvMode | None:
    """The mode that a text names; None for the exact one. Raises BadRequest that says what is wrong."""
    if text in _OFF:
        return None
    if len(text) > MAX_CHARS:
        raise _bad(f"has {len(text)} characters, at most {MAX_CHARS} are allowed")
    given: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if name not in _NAMES:
            raise _bad(f"knows no {name!r}", suggest(name, [*_NAMES, EXACT]) or _HINT)
        if name in given:
            raise _bad(f"says {name} twice")
        if not equals or not re.fullmatch(r"[0-9]{1,9}", number):
            raise _bad(f"needs a number of {'pages' if name == 'select' else 'tokens'} after {name}=, not {number!r}")
        given[name] = int(number)
    if "exact_first" in given or "exact_last" in given:
        return _ladder(given)
    if "select" in given:
        return _select(given)
    if "window" not in given:
        raise _bad("needs a window beside the sinks")
    window, sinks = given["window"], given.get("sinks", 0)
    if not MIN_WINDOW_TOKENS <= window <= MAX_TOKENS:
        raise _bad(f"needs a window of {MIN_WINDOW_TOKENS} (a page) to {MAX_TOKENS} tokens, not {window}")
    if "sinks" in given and not 1 <= sinks <= MAX_TOKENS:
        raise _bad(f"needs 1 to {MAX_TOKENS} sinks, not {sinks}")
    return KvMode(window, sinks)


def _select(given: dict[str, int]) -> KvMode:
    pages = given.pop("select")
    if given:
        raise _bad(f"takes select alone, without {' and '.join(given)}: it keeps the whole context")
    if not MIN_SELECTED <= pages <= MAX_SELECTED:
        raise _bad(f"needs {MIN_SELECTED} to {MAX_SELECTED} pages of {PAGE_TOKENS} tokens, not {pages}")
    return KvMode(read=pages * PAGE_TOKENS)


def _ladder(given: dict[str, int]) -> KvMode:
    first, last = given.pop("exact_first", 0), given.pop("exact_last", 0)
    if given:
        raise _bad(f"takes exact_first and exact_last alone, without {' and '.join(given)}: they keep all of a context")
    if not 1 <= last <= MAX_LADDER_TOKENS or first > MAX_LADDER_TOKENS:
        raise _bad(f"needs an exact_last of 1 to {MAX_LADDER_TOKENS} tokens, and an exact_first of 0 to as many")
    return KvMode(exact_first=up_to_step(first), exact_last=up_to_step(last))


def up_to_step(tokens: int) -> int:
    """Up to what attention reads at a time."""
    return -(-tokens // LADDER_STEP) * LADDER_STEP


def _bad(what: str, hint: str = _HINT) -> BadRequest:
    return BadRequest(f"kv_mode {what}", hint=hint, param="kv_mode")
