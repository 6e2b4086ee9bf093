"""The types of a generation on the wire: small, strict, and the same after a round trip."""

from __future__ import annotations

import msgspec
import pytest

from tierd.daemon.generation import Format, Keep, Message, Sampling, Submit, Tool, ToolCall

FULL = Submit(
    model="m",
    messages=(
        Message("assistant", "", thinking="hm", tool_calls=(ToolCall("c1", "look", '{"at": 1}'),)),
        Message("tool", "a cat", tool_call_id="c1", name="look"),
    ),
    sampling=Sampling(seed=3, stop=("x",)),
    tools=(Tool("look", "Look.", {"type": "object"}, strict=True),),
    tool_choice="function:look",
    format=Format("json_schema", "{}"),
    keep=(Keep(1, 300.0),),
)


def test_a_submit_survives_the_wire() -> None:
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(FULL)), Submit) == FULL


def test_what_is_not_said_takes_no_bytes() -> None:
    assert msgspec.to_builtins(Submit("m", prompt="hi")) == {"model": "m", "prompt": "hi"}
    assert msgspec.to_builtins(Message("user", "hi")) == {"role": "user", "content": "hi"}


@pytest.mark.parametrize("kind", ["xml", "", None])
def test_a_format_that_does_not_exist_is_refused(kind: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": kind}, Format)
