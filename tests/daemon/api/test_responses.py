"""Bodies of /v1/responses to submits, without any I/O."""

from __future__ import annotations

import json

import pytest

from tierd.daemon.api import responses
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.protocol import Format, Keep, Message, Tool, ToolCall

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}', "id": "fc_1"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}


def parse(**fields):
    return responses.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def messages(items, **fields):
    return parse(input=items, **fields).submit.messages


def test_text_and_instructions():
    assert parse().submit.messages == (Message("user", "hi"),)
    call = parse(instructions="Be brief.")
    assert call.submit.messages == (Message("system", "Be brief."), Message("user", "hi"))
    assert call.messages == (Message("user", "hi"),)
    assert parse(input=None, instructions="x").submit.messages == (Message("system", "x"),)


def test_messages_with_and_without_a_type():
    items = [{"role": "developer", "content": "d"},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
             {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
              "content": [{"type": "output_text", "text": "a", "annotations": []}]}]  # fmt: skip
    assert messages(items) == (Message("system", "d"), Message("user", "u"), Message("assistant", "a"))


def test_a_turn_of_the_model_is_one_message():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "so"}
    other = {**CALL, "call_id": "c2"}
    turn = Message("assistant", "so", thinking="hm", tool_calls=(ToolCall("c1", "look", '{"x": 1}'),
                                                                 ToolCall("c2", "look", '{"x": 1}')))  # fmt: skip
    told = messages([thought, said, CALL, other, OUTPUT, {**OUTPUT, "call_id": "c2"}])
    assert told == (turn, Message("tool", "seen", tool_call_id="c1"),
                    Message("tool", "seen", tool_call_id="c2"))  # fmt: skip
    assert [message.content for message in messages([said, said])] == ["so", "so"]
    assert [len(message.tool_calls) for message in messages([CALL, said, other])] == [1, 1]
    assert [message.thinking for message in messages([thought, said, thought, said])] == ["hm", "hm"]


def test_thinking_comes_back_sealed_or_as_a_summary():
    sealed = responses.seal("hm Ö")
    assert responses.unseal(sealed) == "hm Ö" and "hm" not in sealed
    for broken in ("gAAAAABo", "tierd1.!!!", "tierd1./w==", ""):
        assert responses.unseal(broken) == ""
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": sealed}
    assert messages([item])[0].thinking == "hm Ö"
    assert messages([{**item, "encrypted_content": "gAAAAABo"}])[0].thinking == "short"
    assert messages([{**item, "encrypted_content": None, "summary": []}, {"role": "user", "content": "x"}]) == (
        Message("user", "x"),
    )


def test_output_of_a_tool_in_parts():
    told = messages([CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "a"}]}])
    assert told[1].content == "a"


def test_flat_tools_and_namespaces():
    plain = {"type": "object"}
    tools = [{"type": "function", "name": "look", "description": "d", "parameters": plain, "strict": False},
             {"type": "namespace", "name": "mcp__files__", "description": "n", "tools": [
                 {"type": "function", "name": "open", "parameters": plain}, {"type": "custom", "name": "c"}]},
             {"type": "web_search", "external_web_access": False},
             {"type": "custom", "name": "apply_patch"}]  # fmt: skip
    call = parse(tools=tools, tool_choice={"type": "function", "name": "look"})
    assert call.submit.tools == (Tool("look", "d", plain), Tool("mcp__files__open", "", plain))
    assert call.namespaces == {"mcp__files__open": ("mcp__files__", "open")}
    assert call.left_out == ("custom", "web_search") and call.submit.tool_choice == "function:look"
    item = {**CALL, "name": "open", "namespace": "mcp__files__"}
    assert parse(tools=tools, input=[item]).submit.messages[0].tool_calls[0].name == "mcp__files__open"
    choice = {"type": "function", "name": "open", "namespace": "crm"}
    assert parse(tool_choice=choice).submit.tool_choice == "function:crm__open"


def test_options():
    call = parse(max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=4, parallel_tool_calls=False,
                 reasoning={"effort": "low", "summary": "auto"}, cache_salt="s", kv_mode="exact",
                 prompt_cache_retention="24h",
                 text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
                 include=["reasoning.encrypted_content", "message.output_text.logprobs"], top_logprobs=2)  # fmt: skip
    one, drawn = call.submit, call.submit.sampling
    assert (drawn.max_tokens, drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (9, 0.5, 0.9, 3, 4)
    assert not one.parallel_tool_calls and one.thinking is True and one.salt == "s"
    assert one.kv_mode == "exact"
    assert one.format == Format("json_schema", '{"type":"object"}') and one.logprobs == 2
    assert call.following(()).keep == (Keep(1, 86400.0),)
    assert parse(text={"format": {"type": "text"}}).submit.format is None
    assert parse(text={"format": {"type": "json_object"}, "verbosity": "medium"}).submit.format == Format("json_object")
    assert parse(include=["message.output_text.logprobs"]).submit.logprobs == 0 and parse().submit.logprobs is None


def test_earlier_messages_stand_between_instructions_and_input():
    earlier = (Message("user", "a"), Message("assistant", "b"))
    told = parse(instructions="x").following(earlier).messages
    assert [message.content for message in told] == ["x", "a", "b", "hi"]


def test_what_codex_sends_is_accepted():
    parse(client_metadata={"installation_id": "x"}, include=["reasoning.encrypted_content"], input=[], instructions="i",
          parallel_tool_calls=True, prompt_cache_key="k", reasoning=None, store=False, stream=True, tool_choice="auto",
          tools=[], service_tier=None, text=None)  # fmt: skip


@pytest.mark.parametrize("name", sorted(responses.NEUTRAL))
def test_fields_tierd_does_not_have(name):
    for neutral in (None, *responses.NEUTRAL[name]):
        parse(**{name: neutral})
    with pytest.raises(Unsupported) as caught:
        parse(**{name: "auto"})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"), ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0]"),
        ({"input": [{**OUTPUT, "call_id": None}]}, "input[0].call_id"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"), ({"include": ["x"]}, "include[0]"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"), ({"reasoning": {"depth": 5}}, "reasoning.depth"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"), ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"), ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param == param and "`" not in caught.value.message
