"""Ranges of a generation, each at its limit and beyond."""

from __future__ import annotations

import math

import pytest

from tierd.daemon.errors import BadRequest
from tierd.daemon.limits import check_submit
from tierd.daemon.protocol import Message, Sampling, Submit

CONTEXT = 4096


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
        {"priority": 100},
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
        ({"priority": 101}, "priority"),
    ],
)  # fmt: skip
def test_beyond(fields, param):
    with pytest.raises(BadRequest) as caught:
        check(**fields)
    assert caught.value.param == param and param.split("[")[0] in caught.value.message


def test_no_input_at_all():
    with pytest.raises(BadRequest, match="none"):
        check_submit(Submit("m"), CONTEXT)
