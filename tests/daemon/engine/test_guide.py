from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from tests.daemon.engine.vocabularies import SPECIAL, byte_fallback, byte_level
from tierd.daemon.engine import guide, guide_check
from tierd.daemon.engine.guide import Guide, Guides
from tierd.daemon.errors import BadRequest, Unsupported

VOCAB = 300  # more ids than the tokenizer has, as models do
END = byte_level().special[SPECIAL[1]]


@pytest.fixture
def guides() -> Iterator[Guides]:
    one = Guides(byte_level(), VOCAB, (END,))
    yield one
    one.close()


def schema(value: object) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def allowed(one: Guide) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.isfinite(one.masked(np.zeros(VOCAB, np.float32))))]


def test_only_what_fits_can_come_next(guides: Guides) -> None:
    one = guides.guide(lark('start: "the" | "t" "x"'), "format")
    the, th = (byte_level().encode(text)[0] for text in ("the", "th"))
    assert allowed(one) == sorted([ord("t"), th, the])
    one.accept(ord("t"))
    assert ord("x") in allowed(one) and ord("y") not in allowed(one)
    one.accept(ord("x"))
    assert allowed(one) == [END]
    one.accept(END)  # by a request that goes on behind it
    assert allowed(one) == [END]


def test_an_end_comes_where_the_answer_is_whole(guides: Guides) -> None:
    one = guides.guide(lark('start: "a" "b"?'), "format")
    assert END not in allowed(one)
    one.accept(ord("a"))
    assert allowed(one) == [ord("b"), END]


def test_a_masked_logit_is_kept_or_ruled_out(guides: Guides) -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    masked = guides.guide(lark('start: "a"'), "format").masked(logits)
    assert masked[ord("a")] == ord("a") and np.isneginf(masked).sum() == VOCAB - 1 and logits[0] == 0


def test_special_tokens_are_no_text(guides: Guides) -> None:
    one = guides.guide(lark("start: /(.|\\n)+/"), "format")
    tokens = allowed(one)
    assert ord("a") in tokens and not {*byte_level().special.values(), VOCAB - 1} & set(tokens)


def test_a_text_that_spells_a_special_token_is_spelled(guides: Guides) -> None:
    text = f"x{SPECIAL[1]}{SPECIAL[0]}"
    one = guides.guide(schema({"const": text}), "format")
    said: list[int] = []
    while (token := allowed(one)[0]) != END:
        said.append(token)
        one.accept(token)
    assert byte_level().text(said) == f'"{text}"'


def test_a_resumed_stream_is_held_as_the_first_was(guides: Guides) -> None:
    grammar = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    whole, said = guides.guide(grammar, "format"), list(b'{"a": 1')
    for token in said:
        allowed(whole)
        whole.accept(token)
    assert allowed(guides.guide(grammar, "format", said)) == allowed(whole)
    with pytest.raises(BadRequest, match="does not fit"):
        guides.guide(grammar, "format", b"[")


def test_streams_with_one_grammar_go_their_own_ways(guides: Guides) -> None:
    grammar = lark('start: "ab" | "cd"')
    one, two = guides.guide(grammar, "format"), guides.guide(grammar, "format")
    one.accept(ord("a"))
    two.accept(ord("c"))
    assert (allowed(one), allowed(two)) == ([ord("b")], [ord("d")])


def test_a_grammar_is_compiled_once(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    guides.compile(lark('start: "a"'), "format")
    monkeypatch.setattr(guide_check, "check", lambda *_: pytest.fail("compiled again"))
    assert allowed(guides.guide(lark('start: "a"'), "format")) == [ord("a")]


def test_grammars_that_are_kept_are_bounded(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(guide, "MAX_COMPILED", 2)
    monkeypatch.setattr(guide_check, "check", lambda grammar, _: checked.append(grammar))
    for text in "abcbca":
        guides.compile(lark(f'start: "{text}"'), "format")
    assert len(checked) == 4 and len(guides._compiled) == 2


@pytest.mark.parametrize("grammar", [lark("start: nothing"), schema({"type": "array", "uniqueItems": True}), "{"])
def test_a_wrong_grammar_names_its_field(guides: Guides, grammar: str) -> None:
    with pytest.raises(BadRequest) as caught:
        guides.compile(grammar, "format")
    assert caught.value.param == "format" and str(caught.value).startswith("format: ")


def test_a_token_that_does_not_fit_is_an_error(guides: Guides) -> None:
    one = guides.guide(lark('start: "a"'), "format")
    one.accept(ord("b"))
    with pytest.raises(BadRequest, match="too much work"):
        allowed(one)


def test_a_grammar_that_becomes_too_much_work_ends_its_answer(guides: Guides) -> None:
    one = guides.guide(lark('start: x*\nx: "a"*'), "format")
    with pytest.raises(BadRequest, match="too much work"):
        for _ in range(2000):
            allowed(one)
            one.accept(ord("a"))


def test_the_step_waits_for_masks_only_so_long(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "PATIENCE_S", 0.01)
    stuck: Future[guide.Mask] = Future()
    one = Guide(guides.compile(lark('start: "a"'), "format").deep_copy(), VOCAB, [END], lambda _: stuck)
    with pytest.raises(BadRequest, match="too much work"):
        one.masked(np.zeros(VOCAB, np.float32))


def test_patience_is_for_the_whole_answer(guides: Guides) -> None:
    times = iter(range(100))
    done: Future[guide.Mask] = Future()
    done.set_result(np.ones(VOCAB, np.bool_))
    matcher = guides.compile(lark('start: "a"'), "format").deep_copy()
    one = Guide(matcher, VOCAB, [END], lambda _: done, clock=lambda: float(next(times)))
    for _ in range(3):  # each seems to take a second
        one.masked(np.zeros(VOCAB, np.float32))
    assert one._patience_s == pytest.approx(guide.PATIENCE_S - 3 * (1.0 - guide.PATIENCE_PER_TOKEN_S))


def test_masks_are_computed_elsewhere(guides: Guides) -> None:
    threads: list[str] = []
    matcher = guides.compile(lark('start: "a"'), "format").deep_copy()

    def begin(function):  # type: ignore[no-untyped-def]
        return guides._masks.submit(lambda: (threads.append(threading.current_thread().name), function())[1])

    assert allowed(Guide(matcher, VOCAB, [END], begin)) == [ord("a")] and threads == ["masks_0"]


def test_a_vocabulary_that_puts_spaces_before_texts() -> None:
    vocabulary = byte_fallback()
    one = Guides(vocabulary, vocabulary.size, (2,))
    try:
        held = one.guide(lark('start: "ab" " a" "\\n" "é"'), "format")
        said: list[int] = []
        while 2 not in said:
            masked = held.masked(np.zeros(vocabulary.size, np.float32))
            said.append(int(np.flatnonzero(np.isfinite(masked))[0]))
            held.accept(said[-1])
        assert b"".join(vocabulary.token_bytes(token) for token in said) == "ab a\né".encode()
        assert vocabulary.token_text(said[0]) == "ab"  # as the model itself splits it
    finally:
        one.close()


def test_a_model_without_an_end_token_is_not_held() -> None:
    one = Guides(byte_level(), VOCAB, ())
    with pytest.raises(Unsupported, match="no end token"):
        one.compile(lark('start: "a"'), "format")
