"""Bounded memory modes: what a request may give up of its context, so that its pages stay few. Pure, no arrays.

`exact` keeps all. `window=N`: a token sees itself and the N - 1 before it. `sinks=S,window=W` (StreamingLLM, arXiv
2309.17453): it sees the first S tokens, too, as if everything between them and the window had never been; then there
is no end to the text. What neither a window nor sinks have changed yet is exact: the first `exact_tokens` of a sequence
are those of any other request, and their pages are shared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierd.daemon.errors import BadRequest, suggest

EXACT = "exact"
_OFF = ("", EXACT, "none")
BASE_TOKENS = 256  # as in `kernels.rows`
MIN_WINDOW_TOKENS = 16  # a page: less would save nothing
MAX_TOKENS = 1 << 24
MAX_CHARS = 64
_KINDS = "window=N or sinks=S,window=W"
_HINT = f"{_KINDS}, in tokens; or {EXACT!r} for the whole context"


@dataclass(frozen=True, slots=True)
class KvMode:
    """What rows of a sequence see: `window` tokens up to their own, and the first `sinks` of all."""

    window: int
    sinks: int = 0

    def __str__(self) -> str:
        return f"sinks={self.sinks},window={self.window}" if self.sinks else f"window={self.window}"

    @property
    def exact_tokens(self) -> int:
        """So many first tokens of a sequence see all before them: their keys and values are the exact ones."""
        return self.sinks + self.window

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
        if name not in ("window", "sinks"):
            raise _bad(f"knows no {name!r}", suggest(name, ["window", "sinks", EXACT]) or _HINT)
        if name in given:
            raise _bad(f"says {name} twice")
        if not equals or not re.fullmatch(r"[0-9]{1,9}", number):
            raise _bad(f"needs a number of tokens after {name}=, not {number!r}")
        given[name] = int(number)
    if "window" not in given:
        raise _bad("needs a window beside the sinks")
    window, sinks = given["window"], given.get("sinks", 0)
    if not MIN_WINDOW_TOKENS <= window <= MAX_TOKENS:
        raise _bad(f"needs a window of {MIN_WINDOW_TOKENS} (a page) to {MAX_TOKENS} tokens, not {window}")
    if "sinks" in given and not 1 <= sinks <= MAX_TOKENS:
        raise _bad(f"needs 1 to {MAX_TOKENS} sinks, not {sinks}")
    return KvMode(window, sinks)


def _bad(what: str, hint: str = _HINT) -> BadRequest:
    return BadRequest(f"kv_mode {what}", hint=hint, param="kv_mode")
