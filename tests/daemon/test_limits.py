"""Ranges of a generation, each at its limit and beyond."""

from __future__ import annotations

import json
import math

import pytest

from tierd.daemon.errors import BadRequest
from tierd.daemon.limits import check_submit, fitted, with_mode
from tierd.daemon.protocol import Format, Keep, Message, Sampling, Submit, Tool, ToolCall

CONTEXT = 4096


HI = (Message("user", "hi"),)
CALLED = Message("assistant", "", tool_calls=(ToolCall("c", "look", "{}"),))


BIG = {"enum": list(range(16000))}


def called(call_id, name):
    return (Message("assistant", "", tool_calls=(ToolCall(call_id, name, ""),)),)


def deep(levels):
    """A schema of so many levels."""
    schema = {}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


def text(**schema):
    return json.dumps(schema)


def check(**fields):
    names = Submit.__struct_fields__
    given = {name: value for name, value in fields.items() if name in names}
    sampling = Sampling(**{name: value for name, value in fields.items() if name not in names})
    if not {"messages", "prompt", "tokens"} & fields.keys():
        given["prompt"] = "x"
    check_submit(Submit(model="m", sampling=sampling, **given), CONTEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.0}, {"temperature": 100.0}, {"top_k": 0}, {"top_k": 1 << 20}, {"top_p": 1.0},
        {"top_p": 1e-9}, {"min_p": 0.0}, {"min_p": 1.0}, {"repetition_penalty": 0.1}, {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0}, {"seed": -1}, {"seed": (1 << 63) - 1}, {"stop": ("x" * 256,) * 16},
        {"max_tokens": 1}, {"max_tokens": CONTEXT}, {"logit_bias": dict.fromkeys(range(1024), -100.0)},
        {"messages": (Message("system", ""), Message("user", "hi"))}, {"tokens": (0, 5)}, {"ctx": 16}, {"ctx": CONTEXT},
        {"kv_mode": "window=16"}, {"kv_mode": "exact"}, {"kv_mode": "sinks=4,window=64", "max_tokens": 1 << 20},
        {"kv_mode": "select=4"}, {"kv_mode": "h2o=64"},
        {"priority": 100}, {"n": 1}, {"n": 64}, {"n": 3, "best_of": 3}, {"best_of": 64}, {"beam_width": 32, "n": 32},
        {"logprobs": 0}, {"logprobs": 20}, {"salt": "x" * 256}, {"salt": "\0/../é"}, {"prompt": "x", "suffix": ""},
        {"messages": HI, "before": (0, 7)},
        {"messages": HI, "keep": (Keep(0, 0.0), Keep(1, 86400.0), Keep(1, 1.0), Keep(1, 300.0))},
        {"messages": HI, "tools": tuple(Tool(f"f{n}") for n in range(128)), "tool_choice": "function:f127"},
        {"messages": HI, "tools": (Tool("A-z_0" + "x" * 59),), "tool_choice": "required"},
        {"messages": HI, "tools": (Tool("f", parameters=deep(48)),)}, {"messages": HI, "tool_choice": "none"},
        {"messages": HI, "tools": (Tool("f", parameters={"enum": list(range(16382))}),)},
        {"messages": (CALLED, Message("tool", "x", tool_call_id="c", name="look"))},
        {"messages": (CALLED, CALLED, Message("tool", "x"))},
        {"messages": (Message("assistant", "x", thinking="hm"),)},
        {"format": Format("json_object")}, {"format": Format("json_schema", text(type="object"))},
        {"format": Format("json_schema", json.dumps(deep(48)))}, {"format": Format("regex", "x" * 8192)},
        {"format": Format("grammar", "x" * 65536)},
    ],
)  # fmt: skip
def test_within(fields):
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"), ({"top_k": -1}, "top_k"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"), ({"min_p": -0.1}, "min_p"), ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"), ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"seed": 1 << 63}, "seed"), ({"stop": ("x",) * 17}, "stop"), ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": CONTEXT + 1}, "max_tokens"), ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"), ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"), ({"messages": ()}, "messages"), ({"prompt": ""}, "prompt"),
        ({"tokens": ()}, "tokens"), ({"tokens": (-1,)}, "tokens"), ({"prompt": "a", "tokens": (1,)}, "messages"),
        ({"messages": (Message("user", "a"), Message("boss", "b"))}, "messages[1].role"),
        ({"messages": (Message("user", "a"),) * 16385}, "messages"), ({"ctx": 15}, "ctx"),
        ({"ctx": CONTEXT + 1}, "ctx"),
        ({"priority": 101}, "priority"), ({"n": 0}, "n"), ({"n": 65}, "n"), ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"), ({"best_of": 65}, "best_of"), ({"beam_width": -1}, "beam_width"),
        ({"beam_width": 33}, "beam_width"), ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"salt": "x" * 257}, "salt"),
        ({"messages": HI, "suffix": "x"}, "suffix"), ({"tokens": (1,), "suffix": "x"}, "suffix"),
        ({"messages": HI, "keep": (Keep(2, 1.0),)}, "keep"), ({"messages": HI, "keep": (Keep(-1, 1.0),)}, "keep"),
        ({"messages": HI, "keep": (Keep(1, 86401.0),)}, "keep.ttl_s"),
        ({"before": (1,)}, "before"), ({"messages": HI, "before": (-1,)}, "before"),
        ({"messages": HI, "before": (1,), "keep": (Keep(1, 1.0),)}, "before"),
        ({"messages": HI, "keep": (Keep(1, math.nan),)}, "keep.ttl_s"),
        ({"messages": HI, "keep": (Keep(1, 1.0),) * 5}, "keep"), ({"keep": (Keep(0, 1.0),)}, "keep"),
        ({"messages": HI, "tools": tuple(Tool(f"f{n}") for n in range(129))}, "tools"),
        ({"tools": (Tool("f"),)}, "tools"),
        ({"messages": HI, "tools": (Tool("f"), Tool("f"))}, "tools"),
        ({"messages": HI, "tools": (Tool(""),)}, "tools[0].name"),
        ({"messages": HI, "tools": (Tool("x" * 65),)}, "tools[0].name"),
        ({"messages": HI, "tools": (Tool("a b"),)}, "tools[0].name"),
        ({"messages": HI, "tools": (Tool("a\n"),)}, "tools[0].name"),
        ({"messages": HI, "tools": (Tool("f", parameters=deep(49)),)}, "tools[0].parameters"),
        ({"messages": HI, "tools": (Tool("f", parameters={"enum": list(range(16383))}),)}, "tools[0].parameters"),
        ({"messages": HI, "tools": tuple(Tool(f"f{n}", parameters=BIG) for n in range(5))}, "tools"),
        ({"messages": HI, "tools": (Tool("f"),), "tool_choice": "function:g"}, "tool_choice"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "tool_choice": "any"}, "tool_choice"),
        ({"messages": (Message("tool", "x", tool_call_id="c"), CALLED)}, "messages[0].tool_call_id"),
        ({"messages": (Message("user", "x", tool_calls=CALLED.tool_calls),)}, "messages[0]"),
        ({"messages": (Message("user", "x", thinking="hm"),)}, "messages[0]"),
        ({"messages": (Message("user", "x", tool_call_id="c"),)}, "messages[0]"),
        ({"messages": (Message("user", "x", name="bob"),)}, "messages[0]"),
        ({"messages": (Message("tool", "x", name="a b"),)}, "messages[0].name"),
        ({"messages": (Message("assistant", "", tool_calls=CALLED.tool_calls * 2),)}, "messages[0].tool_calls"),
        ({"messages": (Message("assistant", "", tool_calls=tuple(ToolCall(str(n), "f", "") for n in range(129))),)},
         "messages[0].tool_calls"),
        ({"messages": called("", "f")}, "messages[0].tool_calls[0].id"),
        ({"messages": called("c", "a b")}, "messages[0].tool_calls[0].name"),
        ({"format": Format("json_object", "x")}, "format.source"),
        ({"format": Format("json_schema", "")}, "format.source"),
        ({"format": Format("json_schema", "[1]")}, "format.source"),
        ({"format": Format("json_schema", "{")}, "format.source"),
        ({"format": Format("json_schema", json.dumps(deep(49)))}, "format.source"),
        ({"format": Format("json_schema", "[" * 100_000)}, "format.source"),
        ({"format": Format("json_schema", " " * (256 << 10) + "{}")}, "format.source"),
        ({"format": Format("regex", "")}, "format.source"), ({"format": Format("regex", "x" * 8193)}, "format.source"),
        ({"format": Format("grammar", "x" * 65537)}, "format.source"),
        ({"kv_mode": "window=9"}, "kv_mode"), ({"kv_mode": "select=8,window=64"}, "kv_mode"),
        ({"kv_mode": "h2o=9"}, "kv_mode"), ({"kv_mode": "h2o=64,window=64"}, "kv_mode"),
        ({"kv_mode": "x"}, "kv_mode"), ({"kv_mode": "x" * 99}, "kv_mode"),
        ({"kv_mode": "window=64", "max_tokens": CONTEXT + 1}, "max_tokens"),
        ({"kv_mode": "sinks=4,window=64", "max_tokens": (1 << 24) + 1}, "max_tokens"),
    ],
)  # fmt: skip
def test_beyond(fields, param):
    with pytest.raises(BadRequest) as caught:
        check(**fields)
    assert caught.value.param == param and param.split("[")[0] in caught.value.message


def test_more_tokens_than_the_context_are_fitted_into_it():
    within = Submit("m", prompt="x", sampling=Sampling(max_tokens=CONTEXT, top_k=3))
    assert fitted(within, CONTEXT) is within and fitted(Submit("m", prompt="x"), 5).sampling.max_tokens is None
    sampling = Sampling(max_tokens=CONTEXT + 1, top_k=3)
    assert fitted(Submit("m", prompt="x", sampling=sampling), CONTEXT) == within


def test_text_without_an_end_is_not_fitted_into_the_context():
    long = Submit("m", prompt="x", sampling=Sampling(max_tokens=CONTEXT + 1), kv_mode="sinks=4,window=64")
    assert fitted(long, CONTEXT) is long


def test_the_daemons_memory_mode_is_for_requests_that_leave_it_open():
    open_, exact, beams = Submit("m", prompt="x"), Submit("m", kv_mode="exact"), Submit("m", beam_width=2)
    found = with_mode([open_, exact, beams], "window=64")
    assert [one.kv_mode for one in found] == ["window=64", "exact", None]
    assert with_mode([open_], "") == [open_]


def test_no_input_at_all():
    with pytest.raises(BadRequest, match="none"):
        check_submit(Submit("m"), CONTEXT)
