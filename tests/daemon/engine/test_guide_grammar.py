from __future__ import annotations

import json
from typing import Any

import pytest

from tests.daemon.engine.grammars import accepted
from tierd.daemon.engine.guide_grammar import MAX_CALLS, chosen, grammar_of
from tierd.daemon.engine.tool_formats import Dialect, detect
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.generation import MAX_FORMAT_CHARS, MAX_TOOLS
from tierd.daemon.limits import check_submit
from tierd.daemon.protocol import Format, Message, Submit, Tool

F = Tool("f", "", {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
                   "additionalProperties": False, "$defs": {"n": {"type": "integer"}}})  # fmt: skip
G = Tool("g", strict=True)
# Which tokens each family has: the tests' vocabulary is made of bytes and of these.
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "hermes": ("{{ tools }}<tool_call>", ["<tool_call>", "</tool_call>"]),
    "spelled": ("{{ tools }}<tool_call>", []),
    "think": ("{{ tools }}<tool_call>'</think>'", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "spelled think": ("{{ tools }}<tool_call>'</think>'", ["<tool_call>", "</tool_call>"]),
    "llama": ("{{ tools }}", ["<|python_tag|>"]),
    "mistral": ("{{ tools }}", ["[TOOL_CALLS]", "[ARGS]"]),
    "old mistral": ("{{ tools }}", ["[TOOL_CALLS]"]),
    "gpt-oss": ("{{ tools }}", ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]),
}
FORM = Format("json_schema", '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}')


def holds(family: str, text: str, thinking: bool | None = False, **request: Any) -> bool | None:
    """Whether an answer may be this text: False when it may not begin like this, None when it may not end here."""
    template, texts = FAMILIES[family]
    added = {name: 256 + number for number, name in enumerate(texts)}
    submit = Submit("m", messages=(Message("user", "x"),), **request)
    grammar = grammar_of(submit, detect(template, added, added), added, thinking=thinking)
    assert grammar is not None
    return accepted(grammar, texts, text)


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "spelled": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "think": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "llama": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "old mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
}


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_has_to_be_called(family: str) -> None:
    text = CALLS[family]
    request: dict[str, Any] = {"tools": (F, G), "tool_choice": "required"}
    assert holds(family, text, **request) is True
    assert holds(family, text.replace("1", '"x"'), **request) is False
    other = text.replace("functions.f", "functions.h") if family == "gpt-oss" else text.replace("f", "h", 1)
    assert holds(family, other, **request) is False
    assert holds(family, "Hello", **request) is False
    assert holds(family, text, tools=(F, G), tool_choice="function:g") is False


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_read_as_they_are_held(family: str) -> None:
    template, texts = FAMILIES[family]
    added = {name: 256 + number for number, name in enumerate(texts)}
    parser = detect(template, added if family == "llama" else {}, added if "mistral" in family else {}).parser({"f"})
    if family != "gpt-oss":  # its form is made of special tokens
        assert [str(piece) for piece in parser.push(CALLS[family]) + parser.finish()] == [
            "Call(name='f', arguments='{\"a\": 1}')"
        ]


def test_several_calls_are_bounded_and_may_be_forbidden() -> None:
    one = CALLS["hermes"]
    request: dict[str, Any] = {"tools": (F,), "tool_choice": "required"}
    assert holds("hermes", one + "\n" + one, **request) is True
    assert holds("hermes", "\n".join([one] * (MAX_CALLS + 1)), **request) is False
    assert holds("hermes", one + "\n" + one, **request, parallel_tool_calls=False) is False
    assert holds("hermes", one + "\n" + one, tools=(F,), tool_choice="function:f") is False


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama", "gpt-oss"])
def test_a_strict_tool_holds_calls_and_leaves_text(family: str) -> None:
    request: dict[str, Any] = {"tools": (F, G)}  # the model may choose
    final = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    assert holds(family, final + 'Hello {"a"}', **request) is True
    assert holds(family, CALLS[family], **request) is True
    assert holds(family, CALLS[family].replace("1", "x"), **request) is False
    if family in ("hermes", "mistral"):
        assert holds(family, "Well.\n" + CALLS[family], **request) is True


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Format("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (FORM, '{"x": 1}', '{"x": "1"}'),
        (Format("regex", r"[a-c]+/\d"), "abc/7", "abd"),
        (Format("grammar", 'start: "yes" | "no"'), "no", "maybe"),
        (Format("json_schema", "true"), "3", "x"),
    ],
    ids=lambda value: str(getattr(value, "kind", ""))[:20],
)
def test_formats(form: Format, good: str, bad: str) -> None:
    assert holds("hermes", good, format=form) is True
    assert holds("hermes", bad, format=form) is False
    assert holds("gpt-oss", "<|channel|>final<|message|>" + good, format=form) is True


def test_white_space_cannot_go_on_for_ever() -> None:
    assert holds("hermes", '{ "x": 1}', format=FORM) is False
    assert holds("hermes", '{"x":  1}', format=FORM) is False


def test_a_format_beside_tools() -> None:
    assert holds("hermes", CALLS["hermes"], format=FORM, tools=(F,)) is True
    assert holds("hermes", '{"x": 1}', format=FORM, tools=(F,)) is True
    assert holds("hermes", '{"x": 1}', format=FORM, tools=(F,), tool_choice="none") is True
    assert holds("hermes", "Hello", format=FORM, tools=(F,)) is False
    assert holds("hermes", CALLS["hermes"], format=FORM, tools=(F,), tool_choice="none") is False


@pytest.mark.parametrize("family", ["think", "spelled think"])
def test_reasoning_is_free(family: str) -> None:
    assert holds(family, '<think>\n{"a" is it\n</think>\n\n{"x": 1}', None, format=FORM) is True
    assert holds(family, '{"x": 1}', None, format=FORM) is True
    assert holds(family, 'hm</think>{"x": 1}', True, format=FORM) is True
    assert holds(family, '{"x": 1}', True, format=FORM) is None
    assert holds(family, "<think>hm</think>", False, format=FORM) is False
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert holds("gpt-oss", analysis + '<|channel|>final<|message|>{"x": 1}', format=FORM) is True


def test_a_free_answer_has_no_grammar() -> None:
    messages = (Message("user", "x"),)
    free = [Submit("m", messages=messages), Submit("m", messages=messages, tools=(F,)),
            Submit("m", messages=messages, tools=(G,), tool_choice="none")]  # fmt: skip
    assert [grammar_of(submit, Dialect(), {}, thinking=None) for submit in free] == [None] * 3


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"format": Format("json_schema", "{")}, "no JSON"),
        ({"format": Format("json_schema", "[" * 100_000)}, "no JSON"),
        ({"format": Format("json_schema", "3")}, "an object"),
    ],
)
def test_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        grammar_of(Submit("m", prompt="x", **request_), Dialect(), {}, thinking=None)
    assert caught.value.param


@pytest.mark.parametrize(
    "request_",
    [
        {"tool_choice": "sometimes"}, {"tool_choice": "required"}, {"tool_choice": "function:h", "tools": (F,)},
        {"tools": tuple(Tool(f"f{number}") for number in range(MAX_TOOLS + 1))},
        *({"format": Format(kind, "9" * (most + 1))} for kind, most in MAX_FORMAT_CHARS.items()),
    ],
    ids=range(4 + len(MAX_FORMAT_CHARS)),
)  # fmt: skip
def test_what_is_refused_at_the_door_never_comes_here(request_: dict[str, Any]) -> None:
    submit = Submit("m", messages=(Message("user", "x"),), **request_)
    with pytest.raises(BadRequest):
        check_submit(submit, 4096)
    with pytest.raises(AssertionError):
        grammar_of(submit, Dialect(), {}, thinking=None)


@pytest.mark.parametrize("kind", MAX_FORMAT_CHARS)
def test_what_is_let_in_is_not_too_long_here(kind: str) -> None:
    most = MAX_FORMAT_CHARS[kind]
    source = json.dumps({"const": "x" * (most - 20)}) if kind == "json_schema" else "9" * most
    submit = Submit("m", messages=(Message("user", "x"),), format=Format(kind, source))  # type: ignore[arg-type]
    check_submit(submit, 4096)
    assert grammar_of(submit, Dialect(), {}, thinking=None) is not None


def test_a_model_without_calls_cannot_be_made_to_call() -> None:
    with pytest.raises(Unsupported, match="call tools"):
        grammar_of(Submit("m", tools=(F,), tool_choice="required"), Dialect(), {}, thinking=None)


def test_a_schema_cannot_set_the_compilers_options() -> None:
    schema = json.dumps({"type": "object", "x-guidance": {"whitespace_flexible": True}})
    assert holds("hermes", '{ "a":   1}', format=Format("json_schema", schema)) is False


def test_chosen_tools() -> None:
    assert chosen(Submit("m", tools=(F, G))) == [F, G] and chosen(Submit("m", tools=(F,), tool_choice="none")) == []
    assert chosen(Submit("m", tools=(F, G), tool_choice="function:g")) == [G]
