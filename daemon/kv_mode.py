"""Memory modes: what a request may give up of its context, or keep exact of it. Pure, no arrays.

`exact` keeps all. `window=N`: a token sees itself and the N - 1 before it. `sinks=S,window=W` (StreamingLLM, arXiv
2309.17453): it sees the first S tokens, too, as if everything between them and the window had never been; then there
is no end to the text. `select=K` (Quest, arXiv 2406.10774): all is kept, and a token of the answer reads in each layer
only the K pages that its query may weigh most. `h2o=N` (H2O, arXiv 2306.14048): beyond the prompt those pages of N
tokens are kept that rows have looked at most, and the newest. What a mode has not changed yet is exact: the first
`exact_tokens` of a sequence, and with `select` and `h2o` its prompt, are those of any other request, and their pages
are shared.

`exact_first=F,exact_last=L` is for a daemon whose pages are packed: a token sees the first F tokens and those of its
own block of L as they are, and the others packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from tierd.daemon.errors import BadRequest, suggest

EXACT = "exact"
_OFF = ("", EXACT, "none")
_NAMES = ("window", "sinks", "select", "h2o", "exact_first", "exact_last")
BASE_TOKENS = 256  # as in `kernels.rows`
PAGE_TOKENS = 16  # as in `kernels.layout`
MIN_WINDOW_TOKENS = PAGE_TOKENS  # less would save nothing
MIN_SELECTED = 4  # pages: the first, the newest two, and one that is chosen
MAX_SELECTED = 1 << 20
MIN_KEPT_TOKENS = 4 * PAGE_TOKENS  # as many, and for the same pages
MAX_TOKENS = 1 << 24
MAX_CHARS = 64
LADDER_STEP = 32  # as in `kernels.rows`
MAX_LADDER_TOKENS = 1 << 16
_HINT = f"window=N, sinks=S,window=W or h2o=N, in tokens; select=K, in pages; or {EXACT!r} for the whole context"


class Kind(StrEnum):
    """What a mode asks of the kernels: an engine's backend has some of them."""

    WINDOW = "window"
    SINKS = "sinks"
    SELECT = "select"
    H2O = "h2o"
    LADDER = "exact_last"


@dataclass(frozen=True, slots=True)
class KvMode:
    """What rows of a sequence see: `window` tokens up to their own, and the first `sinks` of all; or, in each layer,
    the `read` tokens of the pages that they choose; or the `kept` tokens of pages that are left, the `recent` newest
    of them in any case. Or all, of which `exact_first` and a block of `exact_last` are exact where pages are packed."""

    window: int = 0
    sinks: int = 0
    read: int = 0
    kept: int = 0
    recent: int = 0
    exact_first: int = 0
    exact_last: int = 0

    def __str__(self) -> str:
        if self.exact_last:
            return f"exact_first={self.exact_first},exact_last={self.exact_last}"
        if self.selects:
            return f"select={self.read // PAGE_TOKENS}"
        if self.thins:
            return f"h2o={self.kept}"
        return f"sinks={self.sinks},window={self.window}" if self.sinks else f"window={self.window}"

    @property
    def kind(self) -> Kind:
        """Which of the modes it is."""
        if self.exact_last:
            return Kind.LADDER
        if self.selects:
            return Kind.SELECT
        if self.thins:
            return Kind.H2O
        return Kind.SINKS if self.sinks else Kind.WINDOW

    @property
    def selects(self) -> bool:
        """Whether all pages are kept, and rows choose which of them they read."""
        return self.read > 0

    @property
    def thins(self) -> bool:
        """Whether pages go for good, from anywhere, by how much rows have looked at them."""
        return self.kept > 0

    @property
    def spares_prompt(self) -> bool:
        """Whether all of the prompt is exact, however long it is."""
        return self.selects or self.thins

    @property
    def exact_tokens(self) -> int:
        """So many first tokens of a sequence see all before them: their keys and values are the exact ones."""
        return self.read or self.kept or self.sinks + self.window

    def fitted(self, windows: Iterable[int]) -> KvMode:
        """The mode for a model whose layers have these windows, 0 for none. Raises BadRequest for what can't be.

        A layer counts its window back over the pages that are left: those in it must be all there.
        """
        widest = max(windows, default=0)
        if not self.thins or not widest:
            return self
        if all(windows):
            raise _bad(f"{self} has nothing to weigh: each layer of this model has a window", "leave kv_mode out")
        recent = max(self.recent, (1 - (1 - widest) // PAGE_TOKENS) * PAGE_TOKENS)  # the newest page may have one token
        least = recent + 2 * PAGE_TOKENS  # the first page, and one that is weighed
        if least > self.kept:
            raise _bad(f"{self} is too little for layers with windows of {widest}", f"h2o={least} or more")
        return replace(self, recent=recent)

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
    if "h2o" in given:
        return _thin(given)
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


def _thin(given: dict[str, int]) -> KvMode:
    tokens = given.pop("h2o")
    if given:
        raise _bad(f"takes h2o alone, without {' and '.join(given)}: it keeps the first page and the newest by itself")
    if not MIN_KEPT_TOKENS <= tokens <= MAX_TOKENS:
        raise _bad(f"needs {MIN_KEPT_TOKENS} (4 pages) to {MAX_TOKENS} tokens to keep, not {tokens}")
    pages = tokens // PAGE_TOKENS
    return KvMode(kept=pages * PAGE_TOKENS, recent=pages // 2 * PAGE_TOKENS)


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
