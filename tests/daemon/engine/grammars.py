"""Asks llguidance whether a text fits a grammar, with a vocabulary of bytes and some special tokens."""

from __future__ import annotations

import functools
import re

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tierd.daemon.engine.guide_check import limits


class _Bytes:
    bos_token_id = None

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in (*special, "<end>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _tokenizer(special: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(special)), slices=[])


def accepted(grammar: str, special: list[str], text: str) -> bool | None:
    """True for a whole answer, None for the beginning of one, False for what none begins with.

    Raises AssertionError when the grammar is none.
    """
    matcher = LLMatcher(_tokenizer(tuple(special)), grammar, limits=limits(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    tokens: list[int] = []
    for piece in pieces:
        tokens += [256 + special.index(piece)] if piece in special else piece.encode()
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return False
    return True if matcher.is_accepting() else None
