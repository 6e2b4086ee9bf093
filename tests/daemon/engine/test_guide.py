from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from tests.daemon.engine.vocabularies import SPECIAL, byte_fallback, byte_level
from tierd.daemon.engine import guide, guide_check
from tierd.daemon.engine.guide import Guide, Guides, Masks, Patience
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
    one = Guides(byte_level(), VOCAB, (END,))
    for text in "abcbca":
        one.compile(lark(f'start: "{text}"'), "format")
    one.close()
    assert len(checked) == 4 and len(one._compiled) == 2


@pytest.mark.parametrize("other", [(b"two", b"two"), (b"one", b"one\0salt")], ids=["tenant", "salt"])
def test_what_others_have_compiled_is_compiled_again(
    guides: Guides, monkeypatch: pytest.MonkeyPatch, other: tuple[bytes, bytes]
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(guide_check, "check", lambda grammar, _: checked.append(grammar))
    grammar = lark('start: "a"')
    for tenant, salt in [(b"one", b"one"), (b"one", b"one"), other, other]:
        guides.compile(grammar, "format", tenant, salt)
        guides.guide(grammar, "format", tenant=tenant, salt=salt)
    assert checked == [grammar, grammar]


def test_a_tenant_with_many_grammars_pushes_out_its_own(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(guide_check, "check", lambda grammar, _: checked.append(grammar))
    guides.compile(lark('start: "mine"'), "format", b"one", b"one")
    for number in range(2 * guide.MAX_COMPILED):
        guides.compile(lark(f'start: "{number}"'), "format", b"two", b"two")
    guides.compile(lark('start: "mine"'), "format", b"one", b"one")
    assert len(checked) == 1 + 2 * guide.MAX_COMPILED


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


class Waiting:
    """A thread of masks whose work begins, and takes the seconds it says, once the test's thread waits for a mask."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._asked = threading.Semaphore(0)
        self._waiter = threading.get_ident()
        self.masks = Masks(self._clock)

    def _clock(self) -> float:
        if threading.get_ident() == self._waiter:
            self._asked.release()
        return self.now_s

    def work(self, takes_s: float) -> Callable[[], guide.Mask]:
        def compute() -> guide.Mask:
            assert self._asked.acquire(timeout=20)
            self.now_s += takes_s
            return np.ones(VOCAB, np.bool_)

        return compute


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    one = Waiting()
    yield one
    one.masks.close()


def test_the_step_waits_for_a_mask_only_so_long() -> None:
    gate, whose = threading.Event(), Patience(0.01)
    masks = Masks()

    def stuck() -> guide.Mask:
        assert gate.wait(20)
        return np.ones(1, np.bool_)

    try:
        with pytest.raises(TimeoutError):
            masks.wait(whose, masks.begin(whose, stuck))
    finally:
        gate.set()
        masks.close()


def test_patience_is_for_the_whole_answer(waiting: Waiting) -> None:
    whose = Patience()
    for _ in range(3):
        waiting.masks.wait(whose, waiting.masks.begin(whose, waiting.work(0.5)))
    assert whose.left_s == pytest.approx(guide.PATIENCE_S - 3 * (0.5 - guide.PATIENCE_PER_TOKEN_S))


def test_a_wait_is_put_down_to_the_stream_whose_mask_is_computed(waiting: Waiting) -> None:
    mine, others = Patience(), [Patience() for _ in range(4)]
    masks = waiting.masks
    slow = [masks.begin(other, waiting.work(1.5)) for other in others]
    behind = masks.begin(mine, waiting.work(0.1))
    assert masks.wait(mine, behind).all()  # six seconds of the others' before it
    assert mine.left_s == pytest.approx(guide.PATIENCE_S - 0.1 + guide.PATIENCE_PER_TOKEN_S)
    for other, mask in zip(others, slow, strict=True):
        masks.wait(other, mask)
        assert other.left_s == pytest.approx(guide.PATIENCE_S - 1.5 + guide.PATIENCE_PER_TOKEN_S)


def test_a_stream_that_made_others_wait_too_long_ends_though_its_mask_is_ready(waiting: Waiting) -> None:
    mine, other = Patience(), Patience()
    ambiguous = waiting.masks.begin(other, waiting.work(2.5))
    waiting.masks.wait(mine, waiting.masks.begin(mine, waiting.work(0.0)))
    with pytest.raises(TimeoutError):
        waiting.masks.wait(other, ambiguous)


def test_what_was_computed_while_nobody_waited_costs_nothing(waiting: Waiting) -> None:
    whose = Patience()
    mask = waiting.masks.begin(whose, lambda: np.ones(VOCAB, np.bool_))
    assert mask.result(20).all()
    waiting.now_s += 50.0
    waiting.masks.wait(whose, mask)
    assert whose.left_s == pytest.approx(guide.PATIENCE_S + guide.PATIENCE_PER_TOKEN_S)


def test_a_grammar_that_took_too_long_names_its_field(guides: Guides) -> None:
    one = guides.guide(lark('start: "a"'), "format")
    one._patience.left_s = 0.0
    with pytest.raises(BadRequest, match="too much work"):
        allowed(one)


def test_masks_are_computed_elsewhere(guides: Guides) -> None:
    threads: list[str] = []
    masks, matcher = Masks(), guides.compile(lark('start: "a"'), "format").deep_copy()
    begin = masks.begin

    def noted(whose: Patience, work: Callable[[], guide.Mask]) -> Future[guide.Mask]:
        return begin(whose, lambda: (threads.append(threading.current_thread().name), work())[1])

    masks.begin = noted  # type: ignore[method-assign]
    assert allowed(Guide(matcher, VOCAB, [END], masks)) == [ord("a")] and threads == ["masks_0"]
    masks.close()


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
