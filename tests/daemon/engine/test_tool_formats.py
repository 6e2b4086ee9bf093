from __future__ import annotations

import pytest

from tierd.daemon.engine.answer import CONTROL, Call, Text, Thought
from tierd.daemon.engine.tool_formats import Style, detect

QWEN = "{% if tools %}<tool_call>{% endif %}"
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]


def special(*texts: str) -> dict[str, int]:
    return {text: number for number, text in enumerate(texts)}


@pytest.mark.parametrize(
    ("template", "texts", "style"),
    [
        (QWEN, ["<tool_call>"], Style.TAGGED),
        (QWEN, [], Style.TAGGED),
        (QWEN, ["<|python_tag|>"], Style.TAGGED),  # a Llama that was taught Hermes' way
        ("{{ tools }}<|tool_call|>", ["<|tool_call|>"], Style.TAGGED),
        ("{{ tools }}", ["[TOOL_CALLS]"], Style.MISTRAL),
        ("{{ tools }}", ["<|python_tag|>", "<|eom_id|>"], Style.LLAMA),
        ("{{ messages }}", ["<|python_tag|>"], Style.NONE),
        ("{{ tools }}", HARMONY, Style.HARMONY),
        ("{{ tools }}", [], Style.NONE),
    ],
)
def test_the_template_decides(template: str, texts: list[str], style: Style) -> None:
    assert detect(template, special(*texts), special(*texts)).style is style


def test_special_tokens_are_told_from_their_characters() -> None:
    texts = special("<tool_call>", "</tool_call>")
    dialect = detect(QWEN, texts, texts)
    assert dialect.opening == CONTROL + "<tool_call>" and dialect.opening_id == 0
    assert dialect.controls == {0: CONTROL + "<tool_call>", 1: CONTROL + "</tool_call>"}
    plain = detect(QWEN, {}, texts)
    assert plain.opening == "<tool_call>" and plain.controls == {} and plain.opening_id == 0


def test_ends_that_the_model_files_may_not_name() -> None:
    assert detect("{{ tools }}", special(*HARMONY), special(*HARMONY)).end_ids == {4, 5}
    llama = special("<|python_tag|>", "<|eom_id|>")
    assert detect("{{ tools }}", llama, llama).end_ids == {1}


def test_reasoning() -> None:
    dialect = detect("{{ '</think>' }}", {}, {})
    assert dialect.opens_thinking("<|assistant|><think>\n") and not dialect.opens_thinking("<think>\n\n</think>\n")
    assert dialect.no_thought == "\n\n</think>\n\n"
    assert dialect.parser((), begun=True).push("a</think>b") == [Thought("a"), Text("b")]
    assert detect("", {}, {}).thinking is None
    texts = special("[THINK]", "[/THINK]")
    assert detect("", texts, texts).thinking == (CONTROL + "[THINK]", CONTROL + "[/THINK]")


def test_calls_are_read_when_there_are_tools() -> None:
    dialect = detect(QWEN, {}, {})
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert dialect.parser(["f"]).push(text) == [Call("f", "{}")]
    assert dialect.parser(()).push(text) == [Text(text)]


def test_ids_of_calls_differ_and_fit_the_template() -> None:
    texts = special("[TOOL_CALLS]")
    mistral, qwen = detect("{{ tools }}", texts, texts), detect(QWEN, {}, {})
    ids = {mistral.call_id() for _ in range(50)} | {qwen.call_id() for _ in range(50)}
    assert len(ids) == 100 and {len(one) for one in ids} == {9, 29}
    assert all(one.isalnum() for one in ids if len(one) == 9)
