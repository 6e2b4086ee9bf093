"""OpenAI bodies to submits and back, without any I/O."""

from __future__ import annotations

import json

import msgspec
import pytest

from tierd.daemon import errors
from tierd.daemon.api import openai
from tierd.daemon.errors import BadRequest, TierdError, Unsupported
from tierd.daemon.protocol import Format, Keep, Message, Tool, ToolCall

TURN = {"role": "user", "content": "hi"}


def chat(**fields):
    return openai.parse_chat(json.dumps({"model": "m", "messages": [TURN], **fields}).encode())


def submit(**fields):
    (one,) = chat(**fields).submits
    return one


def test_every_supported_field_arrives():
    call = chat(
        stream=True, stream_options={"include_usage": True}, max_tokens=5, temperature=0.5, top_p=0.9, top_k=7,
        min_p=0.1, presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.1, stop=["a", "b"], seed=3,
        logit_bias={"17": -100}, ignore_eos=True,
    )  # fmt: skip
    sampling = call.submits[0].sampling
    assert call.stream and call.include_usage and call.submits[0].messages == (Message("user", "hi"),)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p) == (7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
    assert sampling.stop == ("a", "b") and sampling.seed == 3 and sampling.ignore_eos
    assert sampling.logit_bias == {17: -100.0}


def test_defaults_are_the_models_own():
    call = chat()
    assert not call.stream and call.submits[0].sampling == type(call.submits[0].sampling)()


def test_one_stop_and_both_names_of_the_limit():
    assert submit(stop="x").sampling.stop == ("x",)
    assert submit(max_completion_tokens=9).sampling.max_tokens == 9
    assert submit(max_tokens=9, max_completion_tokens=9).sampling.max_tokens == 9
    with pytest.raises(BadRequest) as caught:
        chat(max_tokens=8, max_completion_tokens=9)
    assert caught.value.param == "max_completion_tokens"


def test_contents():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts},
                {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}]  # fmt: skip
    assert submit(messages=messages).messages == (
        Message("system", "d"), Message("user", "a\nb"), Message("assistant", "x")
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(openai.METADATA))
def test_metadata_is_accepted(name):
    assert submit(**{name: {"a": 1}}) == submit()


@pytest.mark.parametrize("name", sorted(openai.NEUTRAL))
def test_fields_tierd_does_not_have_are_named_unless_they_ask_for_nothing(name):
    for neutral in (None, *openai.NEUTRAL[name]):
        assert submit(**{name: neutral}) == submit()
    for value in ("nonsense", 2, True, [{"type": "function"}], {"type": "json_object"}, {"x": "y" * 100}):
        with pytest.raises(Unsupported) as caught:
            chat(**{name: value})
        assert caught.value.param == name and name in caught.value.message


def test_unknown_fields_get_a_suggestion():
    with pytest.raises(Unsupported) as caught:
        chat(temprature=1)
    assert caught.value.param == "temprature" and "temperature" in (caught.value.hint or "")
    assert submit(whatever=None) == submit()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"), ({"stop": 5}, "stop"), ({"stop": [5]}, "stop[...]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"), ({"model": 5}, "model"),
        ({"messages": "hi"}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[...].role"), ({"seed": "x"}, "seed"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": [{**TURN, "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{**TURN, "mood": "bad"}]}, "messages[...].mood"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[...].custom"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[...].function.name"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"n": True}, "n"), ({"n": "2"}, "n"), ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"), ({"cache_salt": 5}, "cache_salt"),
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


FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {"x": {}}}}


def test_tools_and_choices():
    one = submit(tools=[{"type": "function", "function": {**FUNCTION, "strict": True}}], parallel_tool_calls=False)
    assert one.tools == (Tool("look", "Looks.", FUNCTION["parameters"], True),) and not one.parallel_tool_calls
    bare = submit(tools=[{"type": "function", "function": {"name": "look"}}]).tools[0]
    assert bare.parameters == {"type": "object", "properties": {}} and bare.description == ""
    for given, choice in (("none", "none"), ("required", "required"), (None, "auto"),
                          ({"type": "function", "function": {"name": "look"}}, "function:look")):  # fmt: skip
        assert submit(tool_choice=given).tool_choice == choice


def test_a_history_with_calls_and_their_answers():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [TURN, {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
             {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen"}]},
             {"role": "assistant", "content": None}]  # fmt: skip
    assert submit(messages=turns).messages == (
        Message("user", "hi"), Message("assistant", "", thinking="hm", tool_calls=(ToolCall("c1", "look", "{}"),)),
        Message("tool", "seen", tool_call_id="c1"), Message("assistant", ""),
    )  # fmt: skip


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None), ({"response_format": None}, None),
        ({"response_format": {"type": "json_object"}}, Format("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         Format("json_schema", TEXT)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Format("json_schema", TEXT)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Format("json_schema", TEXT)),
        ({"guided_json": SCHEMA}, Format("json_schema", TEXT)), ({"guided_regex": "[a-z]+"}, Format("regex", "[a-z]+")),
        ({"guided_grammar": "start: WORD"}, Format("grammar", "start: WORD")),
    ],
)  # fmt: skip
def test_formats(fields, form):
    assert submit(**fields).format == form
    if "guided_json" not in fields and form is not None:
        with pytest.raises(BadRequest, match="only one"):
            chat(**fields, guided_json=SCHEMA)


def test_thinking_logprobs_answers_and_caching():
    for effort, on in (("none", False), ("minimal", False), ("low", True), ("high", True), (None, None)):
        assert submit(reasoning_effort=effort).thinking is on
    assert submit(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}).thinking is False
    assert submit(logprobs=True).logprobs == 0 and submit(logprobs=True, top_logprobs=3).logprobs == 3
    assert submit(logprobs=False).logprobs is None
    one = submit(n=3, best_of=5, cache_salt="s", kv_mode="window=64")
    assert (one.n, one.best_of, one.salt, one.kv_mode) == (3, 5, "s", "window=64")
    assert submit(prompt_cache_retention="24h").keep == (Keep(1, 86400.0),)
    assert submit(prompt_cache_options={"mode": "implicit", "ttl": "30m"}).keep == (Keep(1, 1800.0),)
    assert submit(prompt_cache_retention="in_memory").keep == ()


def completion(**fields):
    return openai.parse_completion(json.dumps({"model": "m", **fields}).encode())


def test_completion_prompts():
    def prompt(value):
        (one,) = completion(prompt=value).submits
        return one

    assert prompt("x").prompt == "x" and prompt(["x"]).prompt == "x"
    assert prompt([1, 2]).tokens == (1, 2) and prompt([[1, 2]]).tokens == (1, 2)
    assert prompt([]).tokens == () and prompt("x").sampling.max_tokens == openai.COMPLETION_MAX_TOKENS
    assert [one.prompt for one in completion(prompt=["a", "b"]).submits] == ["a", "b"]
    assert [one.tokens for one in completion(prompt=[[1], [2, 3]]).submits] == [(1,), (2, 3)]
    assert [one.tokens or one.prompt for one in completion(prompt=["a", [1]]).submits] == ["a", (1,)]
    with pytest.raises(BadRequest, match="mixes"):
        completion(prompt=["a", 1])


def test_completion_options():
    (one,) = completion(prompt="x", suffix="y", logprobs=2, n=2, beam_width=4, guided_regex="a").submits
    assert (one.suffix, one.logprobs, one.n, one.beam_width) == ("y", 2, 2, 4) and one.format == Format("regex", "a")
    assert completion(prompt="x", suffix="").submits[0].suffix is None
    assert completion(prompt="x", echo=True).echo == "x"
    for fields in ({"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"prompt": "a", "logprobs": 0}):
        with pytest.raises(Unsupported) as caught:
            completion(echo=True, **fields)
        assert caught.value.param == "echo"


@pytest.mark.parametrize("kind", errors.TABLE)
def test_every_error_has_a_shape(kind):
    exc = kind("what", hint="do this", param="p")
    inner = msgspec.to_builtins(openai.error(exc))["error"]
    assert inner["message"] == "what; do this" and inner["param"] == "p" and inner["code"] == exc.code
    assert inner["type"].endswith("_error")


def test_models_leave_broken_ones_out():
    good = {"name": "a", "problem": None, "created_s": 1.5, "context": 9}
    (entry,) = openai.models([good, {"name": "b", "problem": "weights are missing"}]).data
    assert entry.id == "a" and entry.created == 1


def test_error_types():
    assert openai.error(TierdError("x")).error.type == "server_error"
