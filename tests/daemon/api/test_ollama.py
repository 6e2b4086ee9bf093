"""Bodies of /api/chat and /api/generate as requests."""

from __future__ import annotations

import json

import pytest

from tierd.daemon.api import ollama
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.generation import Format, Message, Tool, ToolCall

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}


def chat(**fields):
    return ollama.parse_chat(json.dumps({"model": "alpha", "messages": [USER]} | fields).encode())


def generate(**fields):
    return ollama.parse_generate(json.dumps({"model": "alpha", "prompt": "tell"} | fields).encode())


def sampling(**options):
    return chat(options=options).submit.sampling


def test_the_least_that_a_request_needs():
    call = chat()
    assert call.stream and call.keep_alive is None and call.model == "alpha"
    assert call.submit.messages == (Message("user", "hi"),) and call.submit.format is None
    assert call.submit.sampling.max_tokens is None and call.submit.thinking is None


@pytest.mark.parametrize(("given", "name"), [("alpha:latest", "alpha"), ("smollm2:135m", "smollm2:135m")])
def test_latest_is_no_part_of_a_name(given, name):
    call = chat(model=given)
    assert call.model == given and call.submit.model == name


def test_options_are_carried_over():
    found = sampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, seed=7, stop=["a", "b"], num_predict=12,
                     repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)  # fmt: skip
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.seed) == (0.5, 40, 0.9, 0.1, 7)
    assert (found.stop, found.max_tokens, found.repetition_penalty) == (("a", "b"), 12, 1.1)
    assert (found.presence_penalty, found.frequency_penalty) == (0.2, 0.3)
    assert chat(options={"num_ctx": 2048}).submit.ctx == 2048
    assert chat(options={"kv_mode": "window=64"}).submit.kv_mode == "window=64"


@pytest.mark.parametrize(("given", "wanted"), [(-1, None), (-2, None), (5, 5)])
def test_a_negative_number_to_predict_is_no_bound(given, wanted):
    assert sampling(num_predict=given).max_tokens == wanted


def test_a_stop_string_alone_and_a_seed_of_chance():
    found = sampling(stop="END", seed=-1)
    assert found.stop == ("END",) and found.seed is None


@pytest.mark.parametrize("name", sorted(ollama.PLACEMENT))
def test_what_only_places_a_model_has_no_effect(name):
    assert chat(options={name: 3}).submit == chat().submit


@pytest.mark.parametrize(
    "options", [{"mirostat": 0}, {"tfs_z": 1.0}, {"typical_p": 1}, {"penalize_newline": True}, {"mirostat_tau": 5.0},
                {"repeat_last_n": 64}, {"repeat_last_n": 64, "repeat_penalty": 1.0}, {"mirostat": None},
                {"repeat_last_n": -1}],
)  # fmt: skip
def test_options_that_ask_for_nothing(options):
    assert chat(options=options).submit == chat().submit


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mirostat": False}, "options.mirostat"), ({"tfs_z": True}, "options.tfs_z"),  # a flag is no number
        ({"penalize_newline": 1}, "options.penalize_newline"), ({"typical_p": True}, "options.typical_p"),
        ({"mirostat": 1}, "options.mirostat"), ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"typical_p": 0.9}, "options.typical_p"), ({"penalize_newline": False}, "options.penalize_newline"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.2}, "options.repeat_last_n"),
        ({"temprature": 1}, "options.temprature"),
        ({"temperature": "hot"}, "options.temperature"), ({"stop": 5}, "options.stop"),
    ],
)  # fmt: skip
def test_other_options_are_refused_by_name(options, param):
    with pytest.raises(BadRequest) as caught:
        chat(options=options)
    assert caught.value.param == param and param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images"), ({"format": "yaml"}, "format"),
        ({"format": ["json"]}, "format"), ({"think": "high"}, "think"), ({"keep_alive": "soon"}, "keep_alive"),
        ({"tools": [{"type": "code", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "x", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"), ({"temperature": 1}, "temperature"),
        ({"truncate": True}, "truncate"), ({"shift": True}, "shift"),
    ],
)  # fmt: skip
def test_fields_that_are_refused_by_name(fields, param):
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_not_to_cut_is_what_is_done_anyway():
    assert chat(truncate=False, shift=False).submit == chat().submit


@pytest.mark.parametrize("field", [{"template": "{{ .Prompt }}"}, {"images": ["aGk="]}, {"raw": True, "system": "s"},
                                   {"raw": True, "context": [1]}, {"suffix": "x", "system": "s"}])  # fmt: skip
def test_what_a_prompt_cannot_have(field):
    with pytest.raises(BadRequest) as caught:
        generate(**field)
    assert caught.value.param in field


def test_formats():
    assert chat(format="").submit.format is None and chat(format=None).submit.format is None
    assert chat(format="json").submit.format == Format("json_object")
    found = chat(format=SCHEMA).submit.format
    assert found.kind == "json_schema" and json.loads(found.source) == SCHEMA


def test_tools_and_thinking():
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
    submit = chat(tools=[tool], think=True).submit
    assert submit.tools == (Tool("weather", "of a city", SCHEMA),) and submit.thinking is True
    assert chat(think=False).submit.thinking is False


def test_calls_get_ids_and_results_find_them():
    turns = [USER, {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL, CALL]},
             {"role": "tool", "content": "12", "tool_name": "weather"}, {"role": "tool", "content": "13"}]  # fmt: skip
    _, asked, first, second = chat(messages=turns).submit.messages
    assert asked.thinking == "hm" and json.loads(asked.tool_calls[0].arguments) == {"city": "Ulm"}
    assert [call.id for call in asked.tool_calls] == ["call_1_0", "call_1_1"]
    assert first == Message("tool", "12", tool_call_id="call_1_0", name="weather")
    assert second == Message("tool", "13", tool_call_id="call_1_1", name="weather")


def test_ids_of_the_client_are_kept():
    turns = [USER, {"role": "assistant", "tool_calls": [CALL | {"id": "a"}, CALL | {"id": "b"}]},
             {"role": "tool", "content": "13", "tool_call_id": "b"}]  # fmt: skip
    messages = chat(messages=turns).submit.messages
    assert messages[1].tool_calls[0] == ToolCall("a", "weather", messages[1].tool_calls[0].arguments)
    assert messages[2].tool_call_id == "b"


def test_logprobs():
    assert chat().submit.logprobs is None and chat(logprobs=True).submit.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).submit.logprobs == 3


def test_a_prompt_is_a_turn_of_the_user():
    call = generate(system="be brief")
    assert call.submit.messages == (Message("system", "be brief"), Message("user", "tell")) and call.submit.tell_prompt
    assert generate(context=[1, 2]).submit.before == (1, 2)


def test_a_raw_prompt_and_one_with_a_suffix():
    raw = generate(raw=True)
    assert raw.submit.prompt == "tell" and raw.submit.messages is None and not raw.submit.tell_prompt
    infill = generate(suffix="the end").submit
    assert (infill.prompt, infill.suffix) == ("tell", "the end")


@pytest.mark.parametrize("call", [chat(messages=[]), chat(messages=None), generate(prompt=""), generate(prompt=None)])
def test_nothing_asked_is_only_about_loading(call):
    assert call.submit is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("90s", 90.0), ("1.5h", 5400.0), ("100ms", 0.1), (60, 60.0), (0, 0.0),
     ("0", 0.0), ("5", 5.0), (-1, None), ("-1", None), ("-1m", None), (1e300, 1e9)],
)  # fmt: skip
def test_durations(given, seconds):
    assert chat(keep_alive=given).keep_alive == (seconds,)


@pytest.mark.parametrize("text", ["", "m", "5 m", "h5", "5x", "٣m", "--1"])
def test_what_is_no_duration(text):
    with pytest.raises(BadRequest):
        ollama.duration_s(text)


def test_an_unknown_field_has_a_sentence():
    with pytest.raises(Unsupported, match="unknown field 'sistem'"):
        generate(sistem="x")
