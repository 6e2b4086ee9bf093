"""Filling in the middle: a prompt and what is to come after the answer, around the tokens that a model learned for it.

The orders are those of the models' own papers and cards; which tokens a vocabulary holds says which model it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Prefix, suffix and middle as models write them. Where there is no token for the middle, the suffix comes first.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
# They end a filled-in text, beside the ends of any answer and the tokens above: the next file begins, or padding.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens of one model. `middle`: None where the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None
    end_ids: frozenset[int]

    def tokens(self, encode: Callable[[str], list[int]], before: str, after: str) -> list[int]:
        """The prompt for a text between `before` and `after`. `encode` parses no special tokens."""
        if self.middle is None:
            return [self.suffix, *encode(after), self.prefix, *encode(before)]
        return [self.prefix, *encode(before), self.suffix, *encode(after), self.middle]


def fill_in(added: Mapping[str, int]) -> FillIn | None:
    """What a vocabulary has for it; None for nothing."""
    for form in _FORMS:
        if all(text in added for text in form if text):
            prefix, suffix, middle = (added.get(text) for text in form)
            assert prefix is not None and suffix is not None
            ends = {added[text] for text in (*form, *_ENDS) if text in added}
            return FillIn(prefix, suffix, middle, frozenset(ends))
    return None
