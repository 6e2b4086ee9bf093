"""OpenAI bodies to submits and back, without any I/O."""

from __future__ import annotations

import json

import pytest

from tierd.daemon import errors
from tierd.daemon.api import openai
from tierd.daemon.errors import BadRequest, TierdError, Unsupported
from tierd.daemon.protocol import Message

TURN = {"role": "user", "content": "hi"}


def chat(**fields):
    return openai.parse_chat(json.dumps({"model": "m", "messages": [TURN], **fields}).encode())


def test_every_supported_field_arrives():
    call = chat(
        stream=True, stream_options={"include_usage": True}, max_tokens=5, temperature=0.5, top_p=0.9, top_k=7,
        min_p=0.1, presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.1, stop=["a", "b"], seed=3,
        logit_bias={"17": -100}, ignore_eos=True,
    )  # fmt: skip
    sampling = call.submit.sampling
    assert call.stream and call.include_usage and call.submit.messages == (Message("user", "hi"),)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p) == (7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
    assert sampling.stop == ("a", "b") and sampling.seed == 3 and sampling.ignore_eos
    assert sampling.logit_bias == {17: -100.0}


def test_defaults_are_the_models_own():
    call = chat()
    assert not call.stream and call.submit.sampling == type(call.submit.sampling)()


def test_one_stop_and_both_names_of_the_limit():
    assert chat(stop="x").submit.sampling.stop == ("x",)
    assert chat(max_completion_tokens=9).submit.sampling.max_tokens == 9
    assert chat(max_tokens=9, max_completion_tokens=9).submit.sampling.max_tokens == 9
    with pytest.raises(BadRequest) as caught:
        chat(max_tokens=8, max_completion_tokens=9)
    assert caught.value.param == "max_completion_tokens"


def test_contents():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts},
                {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}]  # fmt: skip
    assert chat(messages=messages).submit.messages == (
        Message("system", "d"), Message("user", "a\nb"), Message("assistant", "x")
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(openai.METADATA))
def test_metadata_is_accepted(name):
    assert chat(**{name: {"a": 1}}).submit == chat().submit


@pytest.mark.parametrize("name", sorted(openai._NEUTRAL))
def test_fields_tierd_does_not_have_are_named_unless_they_ask_for_nothing(name):
    for neutral in (None, *openai._NEUTRAL[name]):
        assert chat(**{name: neutral}).submit == chat().submit
    for value in ("nonsense", 2, [{"type": "function"}], {"type": "json_object"}, {"x": "y" * 100}):
        with pytest.raises(Unsupported) as caught:
            chat(**{name: value})
        assert caught.value.param == name and name in caught.value.message


def test_true_is_not_one():
    with pytest.raises(Unsupported):
        chat(n=True)


def test_unknown_fields_get_a_suggestion():
    with pytest.raises(Unsupported) as caught:
        chat(temprature=1)
    assert caught.value.param == "temprature" and "temperature" in (caught.value.hint or "")
    assert chat(whatever=None).submit == chat().submit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"), ({"stop": 5}, "stop"), ({"stop": [5]}, "stop[...]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"), ({"model": 5}, "model"),
        ({"messages": "hi"}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[...].role"), ({"seed": "x"}, "seed"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": [{**TURN, "name": "bob"}]}, "messages[...].name"),
        ({"messages": [{**TURN, "mood": "bad"}]}, "messages[...].mood"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{**TURN, "tool_calls": [{}]}]}, "messages[...].tool_calls[...]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert (caught.value.param or "").startswith(param.split("[...]")[0])
    assert "`" not in caught.value.message


def test_missing_fields():
    for body in ({"messages": [TURN]}, {"model": "m"}):
        with pytest.raises(BadRequest, match="missing"):
            openai.parse_chat(json.dumps(body).encode())


def test_a_bomb_of_brackets_is_not_decoded():
    import tracemalloc

    body = b'{"model":"m","messages":[],"zzz":[' + b"[]," * 1_000_000 + b"[]]}"
    tracemalloc.start()
    with pytest.raises(Unsupported):
        openai.parse_chat(body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * len(body)


def test_completion_prompts():
    def prompt(value):
        return openai.parse_completion(json.dumps({"model": "m", "prompt": value}).encode()).submit

    assert prompt("x").prompt == "x" and prompt(["x"]).prompt == "x"
    assert prompt([1, 2]).tokens == (1, 2) and prompt([[1, 2]]).tokens == (1, 2)
    assert prompt([]).tokens == () and prompt("x").sampling.max_tokens == openai.COMPLETION_MAX_TOKENS
    for several in (["a", "b"], [[1], [2]], ["a", 1]):
        with pytest.raises(Unsupported):
            prompt(several)


@pytest.mark.parametrize("kind", errors.TABLE)
def test_every_error_has_a_shape(kind):
    exc = kind("what", hint="do this", param="p")
    inner = openai.error(exc)["error"]
    assert inner["message"] == "what; do this" and inner["param"] == "p" and inner["code"] == exc.code
    assert inner["type"].endswith("_error")
    again = exc.status == 503 and not isinstance(exc, errors.DaemonUnreachable)
    assert openai.should_retry(exc) == (again or isinstance(exc, errors.EngineFailed))


def test_usage_counts():
    counts = openai.usage({"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4})
    assert counts["total_tokens"] == 7 and counts["prompt_tokens_details"]["cached_tokens"] == 4
    assert openai.usage({})["total_tokens"] == 0


def test_models_leave_broken_ones_out():
    good = {"name": "a", "problem": None, "created_s": 1.5, "context": 9}
    listed = openai.models([good, {"name": "b", "problem": "weights are missing"}])
    assert [entry["id"] for entry in listed["data"]] == ["a"] and listed["data"][0]["created"] == 1


def test_error_types():
    assert openai.error(TierdError("x"))["error"]["type"] == "server_error"
