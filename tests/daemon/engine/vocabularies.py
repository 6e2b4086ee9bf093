"""Tiny tokenizers of the two kinds there are."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tierd.daemon.engine.tokens import Vocabulary, _byte_of_char

SPECIAL = ("<|im_start|>", "<|im_end|>")


@functools.cache
def byte_level() -> Vocabulary:
    """GPT-2's kind: all 256 bytes, a few merges, one ending inside a character, two special tokens, one added."""
    chars = {byte: char for char, byte in _byte_of_char().items()}
    vocab = {chars[byte]: byte for byte in range(256)}
    merges = []
    for left, right in (
        (b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"s", b"t"), (b"st", b"o"), (b"sto", b"p"),
        (b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x99"), (b"\xc3", b"\xa9"), (b"o", b"\xf0\x9f"),
    ):  # fmt: skip
        pair = tuple("".join(chars[byte] for byte in part) for part in (left, right))
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think> ", special=False, normalized=False)])
    return Vocabulary(tokenizer)


@functools.cache
def byte_fallback() -> Vocabulary:
    """Llama 2's kind: pieces with U+2581 for a space, bytes for everything else, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("\u2581", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return Vocabulary(tokenizer)
