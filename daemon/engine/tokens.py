"""Text to tokens and back: the tokenizer, an incremental UTF-8-safe detokenizer, stop strings.

What has been released after n tokens is a function of those n tokens alone, not of timing or batching. A stream
resumed in another process feeds the tokens that its client has and goes on with exactly the text that is missing.

Special tokens in text. A raw `prompt` belongs wholly to its sender, so special tokens written in it are parsed, as
llama.cpp's server and vLLM do: fill-in-the-middle needs it. In a chat, only the template may write them; see `chat.py`.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tierd.daemon.engine.answer import overlap
from tierd.daemon.errors import ModelInvalid

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how sentencepiece writes a space


class Vocabulary:
    """One model's tokenizer. Thread-safe: it never changes after construction, except in `encode_as_text`, which the
    owner calls from one thread (that of `encode`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.added = {token.content: int(number) for number, token in added.items()}
        """Tokens that stand for a text of their own, whatever surrounds it."""
        self.special = {token.content: int(number) for number, token in added.items() if token.special}
        """Those of them that are no part of the text."""
        self._special_ids = frozenset(self.special.values())
        self._added_ids = frozenset(added)
        # The state of the decoder alone: the whole tokenizer as JSON takes 0.2 s.
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
        self._byte_level, self.strips_first_space = _decoder_kind(decoder)
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a tokenizer.json. Raises ModelInvalid when it is missing, broken or of an unknown kind."""
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise ModelInvalid(f"{path.name} of this model can't be read: {exc}", hint="pull the model again") from exc
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it are parsed. None are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_as_text(self, text: str) -> list[int]:
        """Token ids of `text` as ordinary characters, even where it spells a special token."""
        self._tokenizer.encode_special_tokens = True
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        return ids

    def ids(self) -> dict[str, int]:
        """Every token as it is written, and its id."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def token_text(self, token: int) -> str | None:
        """How a token is written in the vocabulary, None if there is no such token."""
        text: str | None = self._tokenizer.id_to_token(token)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text. Special tokens and ids without an entry add none."""
        if token in self._special_ids:
            return b""
        text = self.token_text(token)
        if text is None:
            return b""
        if token in self._added_ids:
            return text.encode()
        if self._byte_level:
            table = _byte_of_char()
            # As the tokenizers library: a token with any character outside the byte alphabet is taken verbatim.
            return bytes(table[char] for char in text) if all(char in table for char in text) else text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(_SPACE, " ").encode()

    def text(self, tokens: Iterable[int]) -> str:
        """The whole text of `tokens`, special tokens left out."""
        characters = Detokenizer(self)
        return "".join([characters.push(token) for token in tokens]) + characters.finish()


class Detokenizer:
    """Tokens of one stream in, characters out. Bytes that do not yet make a character are held back.

    `controls`: special tokens that are not left out, and what stands for them. Threading: one owner.
    """

    def __init__(self, vocabulary: Vocabulary, controls: Mapping[int, str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._controls = controls or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = vocabulary.strips_first_space

    def push(self, token: int) -> str:
        """The characters that are whole now that `token` is known."""
        if (control := self._controls.get(token)) is not None:
            return self.finish() + control
        data = self._vocabulary.token_bytes(token)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left when no more tokens come: half a character is marked."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopStrings:
    """Ends a text before the first of some strings. Text that may be the beginning of one is held back.

    `found` is the string that ended it; what came before it has been released. Threading: one owner.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.found: str | None = None

    def push(self, new: str) -> str:
        """The text that may be shown now."""
        if not self._stop:
            return new
        if self.found is not None:
            return ""
        text = self._held + new
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            self._held = ""
            return text[:place]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, when none follows."""
        held, self._held = self._held, ""
        return held


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """(byte level?, first space stripped?) of a tokenizer.json's decoder. Raises ModelInvalid for other kinds."""
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return True, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(part["type"] == "Strip" and part["start"] > 0 and part["content"] == " " for part in parts)
        metaspace = any(part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
        return False, strips or metaspace
    raise ModelInvalid(
        f"this model's tokenizer decodes with {'+'.join(kinds) or 'nothing'}; tierd knows ByteLevel and ByteFallback",
        hint="choose a model of the Llama, Mistral or Qwen kind",
    )


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
