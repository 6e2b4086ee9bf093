from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.daemon.engine.vocabularies import SPECIAL, byte_fallback, byte_level
from tierd.daemon.engine.tokens import Detokenizer, StopStrings, Vocabulary
from tierd.daemon.errors import ModelInvalid

TEXT = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("the stop\u00e9\U0001f642\U0001f643", max_size=60)


class TextStream:
    """Characters up to a stop string."""

    def __init__(self, vocabulary: Vocabulary, stop: tuple[str, ...]) -> None:
        self.characters, self.stops = Detokenizer(vocabulary), StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self.stops.found is not None

    def push(self, token: int) -> str:
        return self.stops.push(self.characters.push(token))

    def finish(self) -> str:
        return self.stops.push(self.characters.finish()) + self.stops.finish()


def streamed(vocabulary: Vocabulary, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(vocabulary, stop)
    return [stream.push(token) for token in tokens] + [stream.finish()]


@given(TEXT)
def test_text_comes_back_byte_level(text: str) -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode_as_text(text)
    assert "".join(streamed(vocabulary, tokens)) == text == vocabulary.text(tokens)


@given(st.text("ab \u00e9\U0001f642", max_size=40))
def test_text_comes_back_byte_fallback(text: str) -> None:
    vocabulary = byte_fallback()
    tokens = vocabulary.encode(text)
    assert "".join(streamed(vocabulary, tokens)) == vocabulary._tokenizer.decode(tokens) == text


@given(st.lists(st.integers(0, 300), max_size=30))
def test_any_tokens_are_shown_as_the_tokenizers_library_shows_them(tokens: list[int]) -> None:
    vocabulary = byte_level()
    assert "".join(streamed(vocabulary, tokens)) == vocabulary._tokenizer.decode(tokens, skip_special_tokens=True)


def test_an_emoji_in_pieces_is_shown_when_it_is_whole() -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode("o\U0001f642!")  # its first two bytes share a token with the o
    parts = streamed(vocabulary, tokens)
    assert "".join(parts) == "o\U0001f642!"
    assert not any("\ufffd" in part for part in parts)
    assert len(tokens) > 3


def test_half_a_character_at_the_end_is_marked() -> None:
    vocabulary = byte_level()
    assert streamed(vocabulary, [0xF0, 0x9F]) == ["", "", "\ufffd"]


def test_special_tokens_are_parsed_and_not_shown() -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode("a<|im_end|>b<think> c")
    assert vocabulary.special["<|im_end|>"] in tokens
    assert vocabulary.text(tokens) == "ab<think> c"
    assert vocabulary.text([*tokens, 10**6]) == "ab<think> c"  # an id without an entry


def test_special_tokens_as_ordinary_text() -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode_as_text("<|im_end|>")
    assert not set(tokens) & set(vocabulary.special.values())
    assert vocabulary.text(tokens) == "<|im_end|>"
    assert vocabulary.encode("<|im_end|>") == [vocabulary.special["<|im_end|>"]]


def test_a_special_token_that_somebody_has_to_see() -> None:
    vocabulary = byte_level()
    start, end = (vocabulary.special[text] for text in SPECIAL)
    characters = Detokenizer(vocabulary, {start: "[start]"})
    # Half a character before it is no part of what comes behind it.
    assert [characters.push(token) for token in (0xF0, start, end, ord("a"))] == ["", "\ufffd[start]", "", "a"]


def test_the_stop_string_that_ended_a_text_is_known() -> None:
    stops = StopStrings(("b", "abc", ""))
    assert [stops.push(part) for part in ("xa", "b", "c")] == ["x", "a", ""]
    assert stops.found == "b"


def test_a_stop_string_over_token_borders_is_never_shown() -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode("the sto stop the")
    parts = streamed(vocabulary, tokens, ("stop",))
    assert "".join(parts) == "the sto "


def test_what_could_begin_a_stop_string_is_shown_when_it_did_not() -> None:
    stream = TextStream(byte_level(), ("\n\nUser:",))
    shown = [stream.push(token) for token in byte_level().encode("a\n\nUs")]
    assert "".join(shown) == "a"
    assert stream.push(ord("x")) == "\n\nUsx"
    assert not stream.stopped


def test_what_was_held_back_is_shown_at_the_end() -> None:
    stream = TextStream(byte_level(), ("abc",))
    assert [stream.push(ord(char)) for char in "xab"] == ["x", "", ""]
    assert stream.finish() == "ab"


@settings(max_examples=300)
@given(
    st.text("stop the\U0001f642", max_size=40), st.lists(st.text("stop \U0001f642", min_size=1, max_size=4), max_size=3)
)
def test_shown_text_is_the_whole_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    vocabulary = byte_level()
    tokens = vocabulary.encode(text)
    wanted, stopped = text, False
    for end in range(len(tokens) + 1):
        so_far = vocabulary.text(tokens[:end]).removesuffix("\ufffd")
        found = [so_far.find(one) for one in stop if one in so_far]
        if found:
            wanted, stopped = so_far[: min(found)], True
            break
    stream = TextStream(vocabulary, tuple(stop))
    shown = ""
    for token in tokens:
        shown += stream.push(token)
        assert wanted.startswith(shown)
    shown += stream.finish()
    assert (shown, stream.stopped) == (wanted, stopped)


@given(st.text("stop \u00e9\U0001f642", max_size=30), st.integers(0, 40))
def test_a_resumed_stream_shows_what_is_missing(text: str, cut: int) -> None:
    vocabulary, stop = byte_level(), ("stop",)
    tokens = vocabulary.encode(text)
    whole = streamed(vocabulary, tokens, stop)
    resumed = TextStream(vocabulary, stop)
    for token in tokens[:cut]:
        resumed.push(token)  # its client has this text
    assert [resumed.push(token) for token in tokens[cut:]] + [resumed.finish()] == whole[min(cut, len(tokens)) :]


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(ModelInvalid, match="decodes with nothing"):
        Vocabulary.load(path)
    path.write_text("{")
    with pytest.raises(ModelInvalid, match=r"tokenizer\.json"):
        Vocabulary.load(path)
