from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.engine.vocabularies import SPECIAL, byte_level
from tierd.daemon.engine.answer import CONTROL, Said
from tierd.daemon.engine.answer_stream import AnswerStream
from tierd.daemon.engine.tool_formats import Dialect, Style

OPEN, CLOSE = (byte_level().special[text] for text in SPECIAL)
DIALECT = Dialect(
    Style.TAGGED, CONTROL + SPECIAL[0], CONTROL + SPECIAL[1], thinking=("<think>", "</think>"),
    controls={OPEN: CONTROL + SPECIAL[0], CLOSE: CONTROL + SPECIAL[1]},
)  # fmt: skip
CALL = [OPEN, *b'{"name": "f", "arguments": {"a": 1}}', CLOSE]


def stream(stop: tuple[str, ...] = (), *, one_call: bool = False) -> AnswerStream:
    ids = itertools.count()
    return AnswerStream(
        byte_level(), stop, parser=DIALECT.parser({"f"}), controls=DIALECT.controls,
        call_id=lambda: f"id{next(ids)}", one_call=one_call,
    )  # fmt: skip


def told(one: AnswerStream, tokens: list[int]) -> Said:
    said = Said()
    for token in tokens:
        said.add(one.push(token))
    said.add(one.finish())
    assert said == one.told
    return said


def test_text_reasoning_and_calls() -> None:
    said = told(stream(), [*b"<think>hm</think>Well. ", *CALL, *CALL])
    call = {"index": 0, "id": "id0", "name": "f", "arguments": '{"a": 1}'}
    assert said == Said("Well.", "hm", [call, call | {"index": 1, "id": "id1"}])


def test_the_tokens_of_reasoning_are_counted_beside_it() -> None:
    one = stream()
    pushed = [one.push(token) for token in b"<think>hm, so</think>Well. "]
    in_one_event = Said()
    for said in pushed:
        in_one_event.add(said)
    assert in_one_event.thinking == "hm, so" and in_one_event.text.startswith("Well.")
    assert len(b"hm, so") <= in_one_event.thinking_tokens <= len(b"<think>hm, so")
    assert one.told.thinking_tokens == in_one_event.thinking_tokens == in_one_event.data()["thinking_tokens"]
    assert sum(said.thinking_tokens for said in pushed if not said.thinking) == 0


def test_reasoning_that_never_ends_is_counted_to_its_last_token() -> None:
    assert told(stream(), [*b"<think>hm</thi"]).thinking_tokens == len(b"<think>hm</thi")
    assert told(stream(), [*b"Well."]).thinking_tokens == 0


def test_without_a_parser_special_tokens_say_nothing() -> None:
    one = AnswerStream(byte_level(), controls=DIALECT.controls)
    assert told(one, [*b"<think>", OPEN, ord("x")]) == Said("<think>x")


def test_characters_that_spell_a_special_token_are_text() -> None:
    spelled = [*SPECIAL[0].encode(), *b'{"name": "f"}']
    assert told(stream(), spelled) == Said(bytes(spelled).decode())
    assert told(stream(), [*(CONTROL + SPECIAL[0]).encode()]) == Said("\ufffd" + SPECIAL[0])


def test_stop_strings_are_of_visible_text() -> None:
    one = stream(("hm", "1}"))
    assert told(one, [*b"<think>hm</think>a", *CALL, *b"1}z"]).text == "a" and one.stop == "1}"
    assert told(stream(("ab",)), [ord("a"), *CALL, ord("b")]).text == "ab"  # none reaches over a call


def test_nothing_is_told_behind_a_stop_string() -> None:
    one = stream(("x",))
    assert told(one, [*b"ax", *CALL]) == Said("a") and one.stopped and one.stop == "x"


def test_an_answer_may_end_with_its_first_call() -> None:
    one = stream(one_call=True)
    assert len(told(one, [*CALL, *CALL]).calls) == 1 and one.stopped and one.stop is None


def test_a_call_that_was_cut_is_text() -> None:
    assert told(stream(), CALL[:9]).text == SPECIAL[0] + '{"name":'


TOKENS = st.lists(st.sampled_from([*CALL, *b"<think></think>stop \n", OPEN, CLOSE, 0xF0]), max_size=40)


@settings(max_examples=150, deadline=None)
@given(TOKENS | st.lists(st.sampled_from([CALL, [*b"<think>"], [*b"</think>"], [*b"a st"]]), max_size=5).map(
    lambda parts: [token for part in parts for token in part]
), st.integers(0, 60))  # fmt: skip
def test_a_resumed_stream_tells_what_is_missing(tokens: list[int], cut: int) -> None:
    whole, resumed = stream(("stop",)), stream(("stop",))
    said = Said()
    for token in tokens[:cut]:
        said.add(resumed.push(token))  # its client has this
    for token in tokens[cut:]:
        said.add(resumed.push(token))
    said.add(resumed.finish())
    assert said == told(whole, tokens) and whole.stopped == resumed.stopped


@pytest.mark.parametrize("end", [b"", b"\xf0\x9f"])
def test_half_a_character_at_the_end_is_marked(end: bytes) -> None:
    assert told(stream(), [*b"a", *end]).text == ("a\ufffd" if end else "a")
