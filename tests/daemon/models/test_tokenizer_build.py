"""Built tokenizers against facts, and against the published patterns that transformers carries."""

import inspect

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from tierd.daemon.models import tokenizer_build
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.tokenizer_build import GgufTokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXTS = [
    "Hello world",
    "in 2024 there were 12345 of 7",
    "  two  spaces\n\n\nnew\r\nlines\t tab ",
    "don't I'LL we've",
    "naïve café 日本語 한국어 🙂👩‍👩‍👧 Привет ½ ٣٤٥",
    "def f(x):\n    return x ** 2  # ok\n",
    "",
]


def byte_level(pre: str | None = "smollm", **extra) -> dict[str, object]:
    """Metadata of a small byte-level vocabulary with merges for `he`, `hel`, digits and spaces."""
    merges = [("h", "e"), ("he", "l"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "Ġ"), ("Ġ", "he")]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<user-defined>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges), *specials]
    kinds = [1] * (len(tokens) - 4) + [3, 3, 3, 4]
    meta = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "merges": [f"{a} {b}" for a, b in merges],
        "eos_token_id": len(tokens) - 2,
        **({} if pre is None else {"pre": pre}),
        **extra,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in meta.items()}


def pieces(pre: str | None, text: str) -> list[str]:
    tokenizer = Tokenizer.from_str(GgufTokenizer(byte_level(pre), "m.gguf").json)
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]


def test_special_tokens_are_single_ids():
    built = GgufTokenizer(byte_level(), "m.gguf")
    tokenizer = Tokenizer.from_str(built.json)
    ids = tokenizer.encode("<|im_start|>he<|im_end|><user-defined>").ids
    assert [built.tokens[i] for i in ids] == ["<|im_start|>", "he", "<|im_end|>", "<user-defined>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<user-defined>"
    assert built.token_id("<|im_end|>") == built.special_id("eos") == len(built.tokens) - 2
    assert built.token_id("he") is None and built.token_id("nothing") is None
    assert built.special_id("bos") is None and not built.add_bos


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-4o", ["123", "4"]),
        ("gpt-2", ["1234"]),
        (None, ["1234"]),
    ],
)
def test_how_digits_are_cut(pre, digits):
    assert pieces(pre, "1234") == digits


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "tekken", "llama-bpe", "gpt-4o", "gpt-2", "default"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre, text):
    tokenizer = Tokenizer.from_str(GgufTokenizer(byte_level(pre), "m.gguf").json)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_o200k_cuts_words_at_capitals_and_keeps_their_endings():
    built = GgufTokenizer(byte_level("gpt-4o"), "m.gguf")
    cut = Tokenizer.from_str(built.json).pre_tokenizer.pre_tokenize_str
    text = "HelloWORLDs it's THEY'LL a/b!?/\n\n  x_1234 été "
    assert [text[first:stop] for _, (first, stop) in cut(text)] == [
        "Hello", "WORLDs", " it's", " THEY'LL", " a", "/b", "!?/\n\n", " ", " x", "_", "123", "4", " été", " ",
    ]  # fmt: skip
    assert '"ignore_merges":false' in built.json and not built.add_bos


def test_llama3_adds_bos_and_keeps_whole_pieces():
    built = GgufTokenizer(byte_level("llama-bpe"), "m.gguf")
    assert built.add_bos
    assert '"ignore_merges":true' in built.json
    assert not GgufTokenizer(byte_level("llama-bpe", add_bos_token=False), "m.gguf").add_bos


def test_patterns_are_the_published_ones():
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert tokenizer_build._QWEN2 == PRETOKENIZE_REGEX
    assert inspect.signature(TikTokenConverter).parameters["pattern"].default == tokenizer_build._LLAMA3


def test_qwen2_composes_accents():
    assert pieces("qwen2", "e\u0301") == pieces("qwen2", "é") != pieces("gpt-2", "e\u0301")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2' isn't supported; supported are codeshell"),
        ({"model": "t5"}, "tokenizer 't5' isn't supported; supported are gpt2, llama"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "isn't two tokens"),
        ({"merges": ["a b c"]}, "isn't two tokens"),
        ({"merges": ["zz yy"]}, "can't be built"),
        ({"token_type": np.array([1], np.int32)}, "token_type doesn't fit"),
        ({"token_type": ["x"]}, "token_type doesn't fit"),
    ],
)
def test_what_is_refused(change, match):
    with pytest.raises(ModelFileError, match=match):
        GgufTokenizer(byte_level(**change), "m.gguf")


@pytest.mark.parametrize("value", [-1, 10**6, "2", 1.5, True])
def test_ids_outside_the_vocabulary(value):
    built = GgufTokenizer(byte_level(eos_token_id=value), "m.gguf")
    with pytest.raises(ModelFileError, match="eos_token_id"):
        built.special_id("eos")


def sentencepiece(**extra) -> dict[str, object]:
    """A small SentencePiece vocabulary: control, bytes, letters and pieces whose scores fall with their rank."""
    pieces_ = [SPACE, *"helowrd", "he", "ll", "hell", "hello", SPACE + "w", "or", "ld", SPACE + "hello", "orld"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces_]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces_)
    scores = [0.0] * 259 + [-1e9] * 8 + [-float(i) for i in range(len(pieces_) - 8)]
    meta = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "scores": np.array(scores, np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **extra,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in meta.items()}


def test_sentencepiece():
    built = GgufTokenizer(sentencepiece(), "m.gguf")
    tokenizer = Tokenizer.from_str(built.json)
    encoded = tokenizer.encode("hello world", add_special_tokens=False)
    assert encoded.tokens == [SPACE + "hello", SPACE + "w", "orld"]
    assert tokenizer.decode(encoded.ids) == "hello world"
    assert built.add_bos and built.special_id("bos") == 1
    emoji = tokenizer.encode("🙂", add_special_tokens=False)
    assert emoji.tokens == [SPACE, "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.decode(emoji.ids) == "🙂"
    assert tokenizer.encode("<s>hello", add_special_tokens=False).tokens == ["<s>", SPACE + "hello"]


def test_sentencepiece_without_the_prefix_space():
    tokenizer = Tokenizer.from_str(GgufTokenizer(sentencepiece(add_space_prefix=False), "m.gguf").json)
    encoded = tokenizer.encode("hello", add_special_tokens=False)
    assert encoded.tokens == ["hello"] and tokenizer.decode(encoded.ids) == "hello"


@pytest.mark.parametrize("scores", [None, np.zeros(3, np.float32), np.full(277, np.nan, np.float32)])
def test_sentencepiece_scores_must_fit(scores):
    with pytest.raises(ModelFileError, match="scores don't fit"):
        GgufTokenizer(sentencepiece(scores=scores), "m.gguf")
