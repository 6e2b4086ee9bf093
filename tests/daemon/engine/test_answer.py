from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.daemon.engine.answer import CONTROL, Call, JsonSpan, Said, Text, call_named, calls_in, clean, overlap, plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]\n\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"}\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
    st.text('}]"x ', max_size=4),
)
def test_the_end_of_a_value_is_found_as_it_grows(value: object, more: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    span = JsonSpan()
    found = [span.end((text + more)[:length]) for length in range(1, len(text + more) + 1)]
    assert found == [None] * (len(text) - 1) + [len(text)] * (1 + len(more)) and not span.broken


def test_what_cannot_be_json_is_seen_at_once() -> None:
    for text in ("{<", "{'a'", "[1;", '{"a": \\'):
        span = JsonSpan()
        assert span.end(text) is None and span.broken


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"name": "f", "arguments": {"a": "\u00e9"}}', [Call("f", '{"a": "\u00e9"}')]),
        ('{"name": "f", "parameters": {}}', [Call("f", "{}")]),
        ('{"name": "f"}', [Call("f", "{}")]),
        ('{"name": "f", "arguments": ""}', [Call("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f", '{"a": 1}')]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [Call("f", '{"a": 1}')]),
        ('[{"name": "f"}, {"name": "g"}]', [Call("f", "{}"), Call("g", "{}")]),
        ('{"name": "f", "arguments": {"a": "\\ud83d"}}', [Call("f", '{"a": "\\ud83d"}')]),  # half a character
        ("[]", None),
        ('[{"name": "f"}, 1]', None),
        ('{"name": "", "arguments": {}}', None),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": {"a": 1e999}}', None),
        ('{"name": "f", "arguments": {"a": Infinity}}', None),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100_000, None),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", None),  # more digits than Python reads
        ("3", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_calls(text: str, wanted: list[Call] | None) -> None:
    assert calls_in(text) == wanted


def test_arguments_of_a_named_call_are_an_object() -> None:
    assert call_named("f", '{"a": 1}') == [Call("f", '{"a": 1}')]
    assert call_named("f", "[1]") is None


def test_what_was_said_adds_up() -> None:
    said = Said("a", calls=[{"index": 0}])
    assert not Said() and said.data() == {"text": "a", "calls": [{"index": 0}]}
    said.add(Said("b", "hm", thinking_tokens=2))
    said.add(Said("", "m", thinking_tokens=1))
    assert said.data() == {"text": "ab", "thinking": "hmm", "thinking_tokens": 3, "calls": [{"index": 0}]}


def test_the_mark_of_special_tokens_is_not_told() -> None:
    assert plain(CONTROL + "<x>") == [Text("<x>")] and plain("") == []
    assert clean(CONTROL + "<x>") == "\ufffd<x>"


def test_overlap() -> None:
    assert [overlap(text, "abc") for text in ("xab", "abc", "a", "", "b")] == [2, 0, 1, 0, 0]
