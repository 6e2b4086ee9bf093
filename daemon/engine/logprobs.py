"""Log probabilities of drawn tokens and of the likeliest alternatives.

They are those of the model itself: of its logits before bias, penalties, masks and temperature, as OpenAI gives them
and vLLM does by default. So they mean the same at every temperature, and a draw among five tokens does not look
certain. A token that the model rules out has `NEVER`, since JSON has no infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.daemon.engine.sampler import Floats, largest
from tierd.daemon.engine.tokens import Vocabulary

NEVER = -9999.0


class Logprobs:
    """What one stream tells of its tokens. Threading: step thread only.

    Args:
        vocabulary: for texts and bytes.
        alternatives: how many of the likeliest tokens are told beside each token, the drawn one among them or not.
    """

    def __init__(self, vocabulary: Vocabulary, alternatives: int) -> None:
        self.total = 0.0  # of the tokens drawn here, an end token included; not of those that were resumed
        self._vocabulary = vocabulary
        self._alternatives = alternatives
        self._waiting: list[dict[str, Any]] = []

    def add(self, logits: Floats, token: int) -> None:  # logits [vocab]
        """Note a token that was drawn from these logits."""
        values = log_softmax(logits)
        top = largest(logits, self._alternatives) if self._alternatives else ()
        entry = self._entry(token, float(values[token]))
        self.total += entry["logprob"]
        self._waiting.append(entry | {"top": [self._entry(int(other), float(values[other])) for other in top]})

    def take(self, count: int) -> list[dict[str, Any]]:
        """The entries of the `count` tokens that are told next. What is noted of others, an end token, is dropped."""
        entries, self._waiting = self._waiting[:count], []
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        vocabulary = self._vocabulary
        # A special token adds nothing to the text, but here one wants to see what it is.
        data = vocabulary.token_bytes(token) or (vocabulary.token_text(token) or "").encode()
        return {
            "token": token,
            "text": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": max(logprob, NEVER),
        }


def log_softmax(logits: Floats) -> Floats:  # [vocab] -> [vocab]
    """Logarithms of the probabilities that the logits stand for, in fp32 but for the sum."""
    shifted = logits - logits.max()
    norm = np.log(np.exp(shifted).sum(dtype=np.float64))
    result: Floats = shifted - np.float32(norm)
    return result
