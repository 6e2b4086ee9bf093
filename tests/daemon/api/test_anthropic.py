"""Bodies of /v1/messages as requests."""

from __future__ import annotations

import json

import pytest

from tierd.daemon.api.anthropic import parse_count, parse_messages, without_attribution
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.generation import Format, Keep, Message, Tool, ToolCall

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}, {"name": "time", "input_schema": {}}]
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def parse(strip=True, **fields):
    body = {"model": "alpha", "max_tokens": 8, "messages": [USER]} | fields
    return parse_messages(json.dumps(body).encode(), strip_attribution=strip)


def messages(*turns, **fields):
    return parse(messages=list(turns), **fields).submit.messages


def text(words, **more):
    return {"type": "text", "text": words, **more}


def test_the_least_that_a_request_needs():
    call = parse()
    assert call.submit.messages == (Message("user", "hi"),) and call.submit.model == "alpha"
    assert call.submit.sampling.max_tokens == 8 and call.submit.sampling.temperature is None
    assert not call.stream and call.submit.thinking is None and call.submit.keep == ()


def test_sampling_is_carried_over():
    sampling = parse(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"], stream=True).submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 40, ("END",))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x", "input_schema": {"description": "x" * 70_000}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"), ({"container": "c"}, "container"),
        ({"thinking": {"type": "hard"}}, "thinking.type"), ({"cache_control": {"type": "forever"}}, "cache_control"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_unknown_fields_are_skipped_everywhere():
    turn = {"role": "user", "content": [text("hi", citations=None, new=1)], "new": {"a": [1]}}
    assert messages(turn, new_field={"deep": [1, 2]}, context_management={"edits": []}) == (Message("user", "hi"),)


def test_the_system_prompt_as_text_and_as_blocks():
    assert messages(USER, system="be brief")[0] == Message("system", "be brief")
    assert messages(USER, system=[text("a"), text("b", cache_control=EPHEMERAL)])[0] == Message("system", "a\nb")


def test_consecutive_turns_of_one_role_are_one():
    turns = [USER, {"role": "user", "content": "there"}, {"role": "assistant", "content": "a"},
             {"role": "assistant", "content": "b"}, USER]  # fmt: skip
    assert messages(*turns) == (Message("user", "hi\nthere"), Message("assistant", "ab"), Message("user", "hi"))


def test_thinking_and_calls_of_an_assistant():
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
              text("I look"), USE]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("12"), text("degrees")]}
    told = messages(USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result, text("so?")]})
    (call,) = told[1].tool_calls
    assert told[1] == Message("assistant", "I look", "hm", (call,))
    assert call == ToolCall("t1", "weather", call.arguments) and json.loads(call.arguments) == {"city": "Ulm"}
    assert told[2:] == (Message("tool", "12\ndegrees", tool_call_id="t1", name="weather"), Message("user", "so?"))


@pytest.mark.parametrize(("content", "said"), [("no net", "Error: no net"), (None, "Error"), ("Error 5", "Error 5")])
def test_a_result_that_is_an_error_says_so(content, said):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": True}
    turns = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert messages(*turns)[-1].content == said


def test_a_result_without_its_call_is_refused():
    with pytest.raises(BadRequest, match="no tool_use before it"):
        messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]})


def test_a_picture_in_a_result_is_refused_by_name():
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}
    with pytest.raises(Unsupported, match=r"messages\[2\].content\[0\].content\[0\]: blocks of type 'image'"):
        messages(USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]})


def test_tools_and_the_choice_among_them():
    submit = parse(tools=TOOLS).submit
    assert submit.tools == (Tool("weather", "of a city", SCHEMA), Tool("time", "", {}))
    assert submit.tool_choice == "auto" and submit.parallel_tool_calls
    for given, wanted in (("any", "required"), ("none", "none"), ("auto", "auto"), ("tool", "function:time")):
        choice = {"type": given, "name": "time"} if given == "tool" else {"type": given}
        assert parse(tools=TOOLS, tool_choice=choice).submit.tool_choice == wanted
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert not parse(tools=TOOLS, tool_choice=alone).submit.parallel_tool_calls


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"type": "enabled", "budget_tokens": 2000}, True), ({"type": "disabled"}, False), ({"type": "adaptive"}, None)],
)
def test_thinking_is_turned_on_and_off(given, wanted):
    assert parse(thinking=given).submit.thinking is wanted


def test_thinking_that_is_not_to_be_shown():
    assert parse(thinking={"type": "enabled", "display": "omitted"}).hide_thinking


@pytest.mark.parametrize("where", [lambda f: {"output_config": {"format": f}}, lambda f: {"output_format": f}])
def test_structured_output(where):
    found = parse(**where({"type": "json_schema", "schema": SCHEMA})).submit.format
    assert found is not None and found == Format("json_schema", found.source) and json.loads(found.source) == SCHEMA


# -- cache_control -----------------------------------------------------------------------------------------------------


def test_breakpoints_become_wishes_in_the_order_of_the_prompt():
    tools = [TOOLS[0], TOOLS[1] | {"cache_control": HOUR}]
    turn = {"role": "user", "content": [text("long", cache_control=EPHEMERAL)]}
    submit = parse(
        tools=tools, system=[text("s", cache_control=HOUR)],
        messages=[turn, {"role": "assistant", "content": "a"}, USER], cache_control=EPHEMERAL,
    ).submit  # fmt: skip
    assert submit.keep == (Keep(0, 3600.0), Keep(1, 3600.0), Keep(2, 300.0), Keep(4, 300.0))


def test_an_automatic_breakpoint_where_one_is_already_is_none():
    turn = {"role": "user", "content": [text("x", cache_control=EPHEMERAL)]}
    assert parse(messages=[turn], cache_control=EPHEMERAL).submit.keep == (Keep(1, 300.0),)


@pytest.mark.parametrize(
    ("marks", "fits"), [([EPHEMERAL] * 4, True), ([EPHEMERAL] * 5, False), ([HOUR, EPHEMERAL], True),
                        ([EPHEMERAL, HOUR], False), ([{"type": "ephemeral", "ttl": "1d"}], False)],
)  # fmt: skip
def test_the_limits_of_breakpoints(marks, fits):
    turn = {"role": "user", "content": [text("x", cache_control=mark) for mark in marks]}
    if fits:
        assert len(parse(messages=[turn]).submit.keep) == len(marks)
    else:
        with pytest.raises(BadRequest, match=r"cache_control"):
            parse(messages=[turn])


# -- attribution -------------------------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.36; cch=abc12;"


def test_attribution_is_dropped_and_told():
    call = parse(system=[text(BILLING), text("You are terse.", cache_control=EPHEMERAL)])
    assert call.submit.messages == (Message("system", "You are terse."), Message("user", "hi"))
    assert call.dropped_attribution and call.submit.keep == (Keep(1, 300.0),)
    assert not parse(system="You are terse.").dropped_attribution


def test_attribution_stays_where_the_user_wants_it():
    call = parse(strip=False, system=[text(BILLING), text("b")])
    assert call.submit.messages is not None
    assert call.submit.messages[0].content == f"{BILLING}\nb" and not call.dropped_attribution


def test_a_system_prompt_of_attribution_alone_is_none():
    assert messages(USER, system=[text(BILLING)]) == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("given", "left"),
    [(f"{BILLING}\nYou are", "You are"), (f"{BILLING}\n{BILLING}\nx", "x"), (f"a\n{BILLING}", f"a\n{BILLING}"),
     ("", "")],
)  # fmt: skip
def test_only_the_lines_at_the_beginning_go(given, left):
    assert without_attribution(given) == left


def test_counting_needs_no_max_tokens():
    body = {"model": "alpha", "messages": [USER], "system": "s", "tools": TOOLS}
    submit = parse_count(json.dumps(body).encode(), strip_attribution=True)
    assert submit.messages == (Message("system", "s"), Message("user", "hi")) and len(submit.tools) == 2


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "\xff"}', b'{"messages": ' + b"[" * 50_000])
def test_what_is_no_request_at_all(body):
    with pytest.raises(BadRequest):
        parse_messages(body, strip_attribution=True)
