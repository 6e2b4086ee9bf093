"""Fields that the OpenAI endpoints share."""

from __future__ import annotations

import msgspec
import pytest

from tierd.daemon.api import openai_fields
from tierd.daemon.api.openai_types import Function, Part
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.protocol import Keep


def raws(**fields):
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def test_unknown_fields_are_told_unless_they_are_null_ignored_or_neutral():
    def check(**fields):
        openai_fields.check_unknown(raws(**fields), ["temperature"], frozenset({"user"}), {"echo": (False,)})

    check(temperature=1, user={"a": 1}, echo=False, whatever=None)
    for fields, param in (({"echo": True}, "echo"), ({"echo": 0}, "echo"), ({"temprature": 1}, "temprature")):
        with pytest.raises(Unsupported) as caught:
            check(**fields)
        assert caught.value.param == param
    assert "temperature" in (caught.value.hint or "")


def test_text_of_parts():
    assert openai_fields.text_of(None, "x") == "" and openai_fields.text_of("a", "x") == "a"
    assert openai_fields.text_of([Part("text", "a"), Part("text", "b")], "x") == "a\nb"
    with pytest.raises(Unsupported) as caught:
        openai_fields.text_of([Part("text", "a"), Part("image_url")], "messages[0].content")
    assert caught.value.param == "messages[0].content[1]"


def test_a_function_without_parameters_takes_none():
    assert openai_fields.tool(Function("f")).parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize("given", [{"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}])
def test_a_named_function_in_both_spellings(given):
    assert openai_fields.tool_choice(given) == "function:f"


def test_how_long_a_prompt_is_kept():
    assert openai_fields.keep("24h", None, 3) == (Keep(3, 86400.0),)
    assert openai_fields.keep(None, "12h", 3) == (Keep(3, 43200.0),)
    assert openai_fields.keep("in-memory", None, 3) == () == openai_fields.keep(None, None, 3)
    with pytest.raises(BadRequest, match="24h"):
        openai_fields.keep(None, "2y", 3)
