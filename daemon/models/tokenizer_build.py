"""GGUF tokenizer metadata -> the JSON of the `tokenizers` library.

Two kinds: `gpt2` (byte-level BPE; `tokenizer.ggml.pre` names how text is cut before merging) and `llama` (SentencePiece
BPE with scores and byte fallback). The tokenizer adds no BOS by itself: the manifest says whether the engine has to.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tierd.daemon.models.errors import ModelFileError

_PREFIX = "tokenizer.ggml."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's stand-in for a space


class TokenKind(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Cut(enum.Enum):
    """How text is cut into pieces before byte-level BPE."""

    GPT2 = "gpt2"
    DIGITS_GPT2 = "digits, then gpt2"
    QWEN2 = "qwen2"
    LLAMA3 = "llama3"
    TEKKEN = "tekken"
    O200K = "o200k"


# Names that converters write to `tokenizer.ggml.pre`, by the way of cutting that they mean.
_CUTS: dict[str, Cut] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion"), Cut.GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), Cut.DIGITS_GPT2),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), Cut.QWEN2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), Cut.LLAMA3),
    "tekken": Cut.TEKKEN,
    "gpt-4o": Cut.O200K,
}
# Those whose vocabulary is complete: a piece that is a token as it is isn't merged from its bytes.
_WHOLE_PIECES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
_ADDS_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})

# Patterns of the published tokenizer.json files of these models.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_O200K = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


class GgufTokenizer:
    """The tokenizer of a GGUF file: `json`, `tokens`, and the ids the engine has to know."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        """Build it. Raises ModelFileError for a kind that isn't supported or lists that don't fit together."""
        self._meta = metadata
        self._where = where
        self.tokens = self._strings("tokens")
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            raise self._error("the vocabulary holds a token twice")
        self._kinds = self._token_kinds()
        model = metadata.get(_PREFIX + "model")
        builders: dict[Any, Callable[[], Tokenizer]] = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if model not in builders:
            raise self._error(f"tokenizer {model!r} isn't supported; supported are {', '.join(builders)}")
        try:
            tokenizer = builders[model]()
        except ModelFileError:
            raise
        except Exception as exc:  # the library raises plain Exception for merges of unknown tokens
            raise self._error(f"the tokenizer can't be built ({exc})") from exc
        tokenizer.add_tokens(self._added_tokens())
        if tokenizer.get_vocab_size() != len(self.tokens):
            raise self._error("special tokens lie outside the vocabulary")
        self.json: str = tokenizer.to_str()
        self.add_bos = bool(metadata.get(_PREFIX + "add_bos_token", self._adds_bos_by_default(model)))

    def token_id(self, text: str) -> int | None:
        """The id of a control or user-defined token, None if there is no such one."""
        i = self._ids.get(text)
        special = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        return i if i is not None and self._kinds[i] in special else None

    def special_id(self, which: str) -> int | None:
        """The id under `tokenizer.ggml.<which>_token_id`, None if the file has none."""
        value = self._meta.get(f"{_PREFIX}{which}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._error(f"{which}_token_id {value!r} isn't in the vocabulary")
        return value

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: {problem}; take another file of this model")

    def _adds_bos_by_default(self, model: Any) -> bool:
        return model == "llama" or self._meta.get(_PREFIX + "pre") in _ADDS_BOS

    def _strings(self, key: str) -> list[str]:
        value = self._meta.get(_PREFIX + key)
        if not isinstance(value, list) or not value:
            raise self._error(f"{_PREFIX}{key} is missing")
        return value

    def _token_kinds(self) -> npt.NDArray[np.int64]:
        kinds = self._meta.get(_PREFIX + "token_type")
        if kinds is None:
            return np.full(len(self.tokens), TokenKind.NORMAL, np.int64)
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(self.tokens) or kinds.dtype.kind not in "iu":
            raise self._error("token_type doesn't fit the tokens")
        return kinds.astype(np.int64)

    def _added_tokens(self) -> list[AddedToken]:
        """Control tokens (never made from text parts, dropped from output) and user-defined ones (plain text)."""
        added = []
        for i in np.flatnonzero(np.isin(self._kinds, (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN))):
            text = self.tokens[i]
            if text:
                special = self._kinds[i] != TokenKind.USER_DEFINED
                added.append(AddedToken(text, special=bool(special), normalized=False))
        return added

    def _byte_level(self) -> Tokenizer:
        pre = self._meta.get(_PREFIX + "pre", "default")
        if pre not in _CUTS:
            raise self._error(f"pre-tokenizer {pre!r} isn't supported; supported are {', '.join(sorted(_CUTS))}")
        merges = []
        for line in self._strings("merges"):
            left, space, right = line.partition(" ")
            if not space or not left or not right or " " in right:
                raise self._error(f"merge {line[:40]!r} isn't two tokens")
            merges.append((left, right))
        tokenizer = Tokenizer(models.BPE(vocab=self._ids, merges=merges, ignore_merges=pre in _WHOLE_PIECES))
        tokenizer.pre_tokenizer = _pre_tokenizer(_CUTS[pre])
        tokenizer.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        scores = self._meta.get(_PREFIX + "scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self.tokens) or not np.isfinite(scores).all():
            raise self._error("scores don't fit the tokens")
        unknown = np.flatnonzero(self._kinds == TokenKind.UNKNOWN)
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=self._merges_of_scores(scores.astype(np.float64)),
                unk_token=self.tokens[unknown[0]] if len(unknown) else None,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
        undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._meta.get(_PREFIX + "add_space_prefix", True):
            steps.insert(0, normalizers.Prepend(_SPACE))
            undo.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence(undo)
        return tokenizer

    def _merges_of_scores(self, scores: npt.NDArray[np.float64]) -> list[tuple[str, str]]:
        """SentencePiece merges the pair whose result has the best score: each split of a piece, by that score."""
        ranked: list[tuple[float, int, int, int, str, str]] = []
        for i in np.flatnonzero(np.isin(self._kinds, (TokenKind.NORMAL, TokenKind.USER_DEFINED))).tolist():
            token = self.tokens[i]
            for cut in range(1, min(len(token), 256)):
                left, right = self._ids.get(token[:cut]), self._ids.get(token[cut:])
                if left is not None and right is not None:
                    ranked.append((-scores[i], i, left, right, token[:cut], token[cut:]))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]


def _pre_tokenizer(cut: Cut) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match cut:
        case Cut.GPT2:
            return gpt2
        case Cut.DIGITS_GPT2:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case Cut.QWEN2:
            return _pattern(_QWEN2)
        case Cut.LLAMA3:
            return _pattern(_LLAMA3)
        case Cut.TEKKEN:
            return _pattern(_TEKKEN)
        case Cut.O200K:
            return _pattern(_O200K)
        case _:
            assert_never(cut)


def _pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
