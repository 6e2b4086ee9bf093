from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.daemon.engine.answer import CONTROL as C
from tierd.daemon.engine.answer import Call, Parser, Piece, Text, Thought
from tierd.daemon.engine.tool_harmony import Harmony
from tierd.daemon.engine.tool_parsers import Bare, Reasoning, Tagged, Untagged, Verbatim

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: Tagged("<tool_call>", "</tool_call>"),
    "special tags": lambda: Tagged(C + "<tool_call>", C + "</tool_call>"),
    "mistral": lambda: Tagged(C + "[TOOL_CALLS]", "", C + "[ARGS]"),
    "llama": lambda: Bare(C + "<|python_tag|>", {"f", "brave.search"}),
    "harmony": Harmony,
    "untagged": lambda: Untagged({"f"}, Tagged("<tool_call>", "</tool_call>")),
    "think": lambda: Reasoning("<think>", "</think>", Tagged("<tool_call>", "</tool_call>")),
    "begun": lambda: Reasoning(C + "<think>", C + "</think>", Verbatim(), begun=True),
}
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "\n"],
    "special tags": [C + "<tool_call>", C + "</tool_call>", "<tool_call>"],
    "mistral": [C + "[TOOL_CALLS]", C + "[ARGS]", C + "[CALL_ID]abc", "f", "[", "]", ","],
    "llama": [C + "<|python_tag|>", ";", 'f.call(a=1, b="x")', "\n"],
    "harmony": [
        C + "<|channel|>", C + "<|message|>", C + "<|end|>", C + "<|start|>", "assistant", "final", "analysis",
        "commentary to=functions.f ", C + "<|constrain|>", C + "<|call|>",
    ],
    "untagged": ["<tool_call>", "</tool_call>", "\n"],
    "think": ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n"],
    "begun": [C + "<think>", C + "</think>", "\n\n"],
}  # fmt: skip
JSON = [
    '{"name": "f", "arguments": {"a": "}</tool_call>\\""}}', '{"name": "g", "parameters": {}}', '{"a": 1}', '{"', '"',
    "{", "}", "[", "\\", " ", "text", "t",
]  # fmt: skip


def folded(pieces: list[Piece]) -> tuple[str, str, list[Call]]:
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Text)),
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        [piece for piece in pieces if isinstance(piece, Call)],
    )


def read(kind: str, *parts: str) -> tuple[str, str, list[Call]]:
    parser = PARSERS[kind]()
    return folded([piece for part in parts for piece in parser.push(part)] + parser.finish())


def call(name: str = "f", **arguments: object) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_change_nothing(kind: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[kind] + JSON), max_size=9)))
    whole = read(kind, text)
    assert read(kind, *text) == whole
    for cut in range(1, len(text)):
        assert read(kind, text[:cut], text[cut:]) == whole


@pytest.mark.parametrize("kind", ["hermes", "special tags", "mistral", "llama", "untagged"])
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_is_no_call_is_text(kind: str, data: st.DataObject) -> None:
    # No fragment makes a whole call, so everything has to come out again, but for white space.
    broken = [part for part in FRAGMENTS[kind] + JSON if "name" not in part and ".call" not in part]
    text = "".join(data.draw(st.lists(st.sampled_from(broken), max_size=9)))
    said, thought, calls = read(kind, text)
    if not calls:
        assert "".join(said.split()) == "".join(text.replace(C, "").split()) and not thought
    else:
        assert kind == "mistral"  # `[TOOL_CALLS]f[ARGS]{"a": 1}` can be made of these


CASES = {
    "two calls": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "g", "arguments": {}}\n</tool_call>\n',
        ("Let me look.", "", [call(a=1), call("g")]),
    ),
    "the closing tag in an argument": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\\"}"}}</tool_call>',
        ("", "", [call(a='x</tool_call>"}')]),
    ),
    "no closing tag": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', ("", "", [call(a=1)])),
    "text after a call": (
        "hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> so', (" so", "", [call()]),
    ),
    "cut by a limit": ("hermes", 'a\n<tool_call>\n{"name": "f", "ar', ('a\n<tool_call>\n{"name": "f", "ar', "", [])),
    "no JSON": ("hermes", "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", "", [])),
    "a bad one, then a good one": (
        "hermes",
        '<tool_call>{"name": 1}</tool_call><tool_call>{"name": "f"}</tool_call>',
        ('<tool_call>{"name": 1}</tool_call>', "", [call()]),
    ),
    "numbers that JSON has not": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", []),
    ),
    "a line end in a string": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', ("", "", [call(a="1\n2")]),
    ),
    "arguments as text": (
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [call(a=1)]),
    ),
    "characters that spell a special token": (
        "special tags", '<tool_call>{"name": "f"}</tool_call>', ('<tool_call>{"name": "f"}</tool_call>', "", []),
    ),
    "mistral's array": (
        "mistral",
        C + '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", "", [call(a=1), call("g")]),
    ),
    "mistral's names": (
        "mistral",
        f'Well.{C}[TOOL_CALLS]f{C}[CALL_ID]abcdefghi{C}[ARGS]{{"a": 1}}{C}[TOOL_CALLS]g{C}[ARGS]{{}}',
        ("Well.", "", [call(a=1), call("g")]),
    ),
    "llama, bare": ("llama", '{"name": "f", "parameters": {"a": 1}}; {"name": "f"}', ("", "", [call(a=1), call()])),
    "llama, marked": ("llama", C + '<|python_tag|>{"name": "g", "parameters": {}}', ("", "", [call("g")])),
    "llama, built in": (
        "llama", C + '<|python_tag|>brave.search.call(query="x")', ("", "", [call("brave.search", query="x")]),
    ),
    "llama, code": ("llama", C + "<|python_tag|>print(1)", ("<|python_tag|>print(1)", "", [])),
    "llama, an answer in JSON": ("llama", '{"name": "Ada"} is it', ('{"name": "Ada"} is it', "", [])),
    "llama, JSON later": ("llama", 'See {"name": "f"}', ('See {"name": "f"}', "", [])),
    "tags forgotten": (
        "untagged", '{"name": "f", "arguments": {"a": 1}}\n{"name": "f"} ok', (" ok", "", [call(a=1), call()]),
    ),
    "an unknown tool without tags": ("untagged", ' {"name": "g"}', (' {"name": "g"}', "", [])),
    "tags remembered": ("untagged", 'So: <tool_call>{"name": "g"}</tool_call>', ("So:", "", [call("g")])),
    "gpt-oss": (
        "harmony",
        f"{C}<|channel|>analysis{C}<|message|>hm{C}<|end|>{C}<|start|>assistant{C}<|channel|>commentary"
        f"{C}<|message|>Wait.{C}<|end|>{C}<|start|>assistant{C}<|channel|>commentary to=functions.f {C}<|constrain|>"
        f'json{C}<|message|>{{"a": 1}}{C}<|call|>',
        ("Wait.", "hm", [call(a=1)]),
    ),
    "gpt-oss, recipient first": (
        "harmony",
        f' to=functions.f{C}<|channel|>commentary json{C}<|message|>{{"a": 1}}',
        ("", "", [call(a=1)]),
    ),
    "gpt-oss, cut": (
        "harmony", f'{C}<|channel|>commentary to=functions.f{C}<|message|>{{"a"', ('{"a"', "", []),
    ),
    "gpt-oss without its form": ("harmony", "Hello", ("Hello", "", [])),
    "thinking, then calling": (
        "think",
        '<think>\nhm\n\nwell\n</think>\n\nYes.\n<tool_call>{"name": "f"}</tool_call>',
        ("Yes.", "hm\n\nwell", [call()]),
    ),
    "thinking of a call": (
        "think", '<think><tool_call>{"name": "f"}</tool_call></think>No.',
        ("No.", '<tool_call>{"name": "f"}</tool_call>', []),
    ),
    "thinking without end": ("begun", "hm </thi", ("", "hm </thi", [])),
    "begun": ("begun", f"\nhm{C}</think>\n\n ok ", ("ok ", "hm", [])),
    "no thinking": ("think", " <thin air", (" <thin air", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forms(case: tuple[str, str, tuple[str, str, list[Call]]]) -> None:
    kind, text, wanted = case
    assert read(kind, text) == wanted == read(kind, *text)


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    parser = PARSERS["hermes"]()
    assert [folded(parser.push(part))[0] for part in ("ab", " ", "c<", "b", "<tool", "_call>", "{")] == [
        "ab", "", " c", "<b", "", "", "",
    ]  # fmt: skip


def test_reasoning_is_told_as_soon_as_it_is_certain() -> None:
    parser = PARSERS["begun"]()
    assert [folded(parser.push(part))[1] for part in ("\n", "a", "\n", "b")] == ["", "a", "", "\nb"]


def test_a_long_call_takes_no_long_time() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x\\n" * 20_000 + '"}}</tool_call>'
    assert len(read("hermes", *(text[place : place + 4] for place in range(0, len(text), 4)))[2]) == 1
