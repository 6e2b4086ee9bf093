"""Every limit at its value and one past it, in every dialect that has words for it: the status and the code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from front_harness import CONTEXT, Wire
from spellings import DIALECTS, Body

from tierd.daemon import keys, limits
from tierd.daemon.api import body_limits, gate, web
from tierd.daemon.api.anthropic import MAX_BREAKPOINTS
from tierd.daemon.api.bodies import MAX_VALUE_BYTES
from tierd.daemon.config_values import MIN_CONTEXT_TOKENS
from tierd.daemon.generation import MAX_FORMAT_CHARS, MAX_TOOLS


class Limit(NamedTuple):
    """What may be asked for, and the least that may not. `only`, `but`: dialects that have it, or another one."""

    name: str
    at: Body
    past: Body
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    is_heavy: bool = False


def over(value: float) -> float:
    return math.nextafter(value, math.inf)


def deep(levels: int) -> Body:
    schema: Body = {}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


def wide(values: int) -> Body:
    """A schema of so many values: itself, its list, and what is in it."""
    return {"enum": [0] * (values - 2)}


def long(chars: int) -> Body:
    """A schema of so many characters of JSON."""
    return {"description": "x" * (chars - len('{"description":""}'))}


def turns(count: int) -> list[tuple[str, str]]:
    """Turns none of which is one with the next, in any dialect."""
    return [("user", "x"), ("system", "x")] * (count // 2) + [("user", "x")] * (count % 2)


def tools(count: int, values: int = 0) -> list[tuple[str, Body]]:
    return [(f"f{number}", wide(values) if values else {}) for number in range(count)]


def calls(*ids: str) -> list[tuple[str, Any]]:
    return [("user", "x"), ("calls", ids), ("user", "x")]


def ids(count: int) -> list[str]:
    return [f"c{number}" for number in range(count)]


BIASES = dict.fromkeys(range(limits.MAX_LOGIT_BIAS), 0.0)
# Their schemas have to be shorter than others: MAX_VALUE_BYTES.
SHORT = ("anthropic", "ollama chat", "ollama generate")
LIMITS = [
    Limit("temperature", {"temperature": limits.MAX_PENALTY}, {"temperature": over(limits.MAX_PENALTY)}),
    Limit("temperature below", {"temperature": 0.0}, {"temperature": -5e-324}),
    Limit("top_p", {"top_p": 1.0}, {"top_p": over(1.0)}),
    Limit("top_p below", {"top_p": 5e-324}, {"top_p": 0.0}),
    Limit("top_k", {"top_k": limits.MAX_TOKEN_ID}, {"top_k": limits.MAX_TOKEN_ID + 1}),
    Limit("min_p", {"min_p": 1.0}, {"min_p": over(1.0)}),
    Limit("seed", {"seed": limits.MAX_SEED}, {"seed": limits.MAX_SEED + 1}),
    Limit("presence", {"presence_penalty": limits.MAX_PENALTY}, {"presence_penalty": over(limits.MAX_PENALTY)}),
    Limit("frequency", {"frequency_penalty": -limits.MAX_PENALTY}, {"frequency_penalty": -over(limits.MAX_PENALTY)}),
    Limit("repetition", {"repetition_penalty": limits.MAX_PENALTY}, {"repetition_penalty": over(limits.MAX_PENALTY)}),
    Limit("stops", {"stop": ["x"] * limits.MAX_STOPS}, {"stop": ["x"] * (limits.MAX_STOPS + 1)}),
    Limit("length of a stop", {"stop": ["x" * limits.MAX_STOP_CHARS]}, {"stop": ["x" * (limits.MAX_STOP_CHARS + 1)]}),
    Limit("max_tokens below", {"max_tokens": 1}, {"max_tokens": 0}, but=("anthropic",)),
    Limit("max_tokens below, Anthropic's", {"max_tokens": 0}, {"max_tokens": -1}, only=("anthropic",)),
    Limit("ctx", {"ctx": MIN_CONTEXT_TOKENS}, {"ctx": MIN_CONTEXT_TOKENS - 1}),
    Limit("biases", {"logit_bias": BIASES}, {"logit_bias": {**BIASES, 9999: 0.0}}),
    Limit("a bias", {"logit_bias": {1: limits.MAX_BIAS}}, {"logit_bias": {1: over(limits.MAX_BIAS)}}),
    Limit("a biased token", {"logit_bias": {limits.MAX_TOKEN_ID: 1.0}}, {"logit_bias": {limits.MAX_TOKEN_ID + 1: 1.0}}),
    Limit("logprobs", {"logprobs": limits.MAX_LOGPROBS}, {"logprobs": limits.MAX_LOGPROBS + 1}),
    Limit("answers", {"n": limits.MAX_ANSWERS}, {"n": limits.MAX_ANSWERS + 1}),
    Limit("computed answers", {"best_of": limits.MAX_ANSWERS}, {"best_of": limits.MAX_ANSWERS + 1}),
    Limit("prompts", {"prompt": ["x"] * limits.MAX_ANSWERS}, {"prompt": ["x"] * (limits.MAX_ANSWERS + 1)}),
    Limit("beams", {"beams": limits.MAX_BEAMS}, {"beams": limits.MAX_BEAMS + 1}),
    Limit("salt", {"salt": "x" * limits.MAX_SALT_CHARS}, {"salt": "x" * (limits.MAX_SALT_CHARS + 1)}),
    Limit("marks of the cache", {"marks": MAX_BREAKPOINTS}, {"marks": MAX_BREAKPOINTS + 1}),
    Limit("tools", {"tools": tools(MAX_TOOLS)}, {"tools": tools(MAX_TOOLS + 1)}),
    Limit("name of a tool", {"tools": [("f" * 64, {})]}, {"tools": [("f" * 65, {})]}),
    Limit("depth of a tool", {"tools": [("f", deep(limits.MAX_SCHEMA_DEPTH))]},
          {"tools": [("f", deep(limits.MAX_SCHEMA_DEPTH + 1))]}),
    Limit("values of a tool", {"tools": [("f", wide(limits.MAX_SCHEMA_VALUES))]},
          {"tools": [("f", wide(limits.MAX_SCHEMA_VALUES + 1))]}),
    Limit("values of all tools", {"tools": tools(4, limits.MAX_TOOL_VALUES // 4)},
          {"tools": [*tools(4, limits.MAX_TOOL_VALUES // 4), ("one_more", {})]}, is_heavy=True),
    Limit("depth of a format", {"schema": deep(limits.MAX_SCHEMA_DEPTH)},
          {"schema": deep(limits.MAX_SCHEMA_DEPTH + 1)}),
    Limit("values of a format", {"schema": wide(limits.MAX_SCHEMA_VALUES)},
          {"schema": wide(limits.MAX_SCHEMA_VALUES + 1)}),
    Limit("length of a format", {"schema": long(MAX_FORMAT_CHARS["json_schema"])},
          {"schema": long(MAX_FORMAT_CHARS["json_schema"] + 1)}, but=SHORT),
    Limit("length of a format, inside a body", {"schema": long(MAX_VALUE_BYTES)}, {"schema": long(MAX_VALUE_BYTES + 1)},
          only=SHORT),
    Limit("length of a tool, inside a body", {"tools": [("f", long(MAX_VALUE_BYTES))]},
          {"tools": [("f", long(MAX_VALUE_BYTES + 1))]}, only=SHORT),
    Limit("regex", {"regex": "x" * MAX_FORMAT_CHARS["regex"]}, {"regex": "x" * (MAX_FORMAT_CHARS["regex"] + 1)}),
    Limit("grammar", {"grammar": "x" * MAX_FORMAT_CHARS["grammar"]},
          {"grammar": "x" * (MAX_FORMAT_CHARS["grammar"] + 1)}),
    Limit("calls", {"messages": calls(*ids(limits.MAX_CALLS))}, {"messages": calls(*ids(limits.MAX_CALLS + 1))}),
    Limit("id of a call", {"messages": calls("c" * limits.MAX_CALL_ID_CHARS)},
          {"messages": calls("c" * (limits.MAX_CALL_ID_CHARS + 1))}),
    Limit("messages", {"messages": turns(limits.MAX_MESSAGES)}, {"messages": turns(limits.MAX_MESSAGES + 1)},
          is_heavy=True),
]  # fmt: skip


def packed(body: Body) -> bytes:
    """JSON without white space: some limits count characters."""
    return json.dumps(body, separators=(",", ":")).encode()


def cases() -> Iterator[Any]:
    for limit in LIMITS:
        for name, dialect in DIALECTS.items():
            if name in limit.but or (limit.only and name not in limit.only):
                continue
            try:
                at, past = dialect.spell(limit.at), dialect.spell(limit.past)
            except KeyError:
                continue  # the dialect has no words for it
            marks = [pytest.mark.long] if limit.is_heavy else []
            yield pytest.param(name, at, past, id=f"{limit.name}-{name}", marks=marks)


@pytest.mark.parametrize(("name", "at", "past"), list(cases()))
async def test_a_value_at_its_limit_and_one_past_it(shared, name, at, past):
    dialect = DIALECTS[name]
    status, answer, _ = await shared.post(dialect.path, packed({"model": "alpha", **at}))
    assert status == 200, answer
    status, answer, _ = await shared.post(dialect.path, packed({"model": "alpha", **past}))
    assert status == 400 and dialect.code(answer) in ("bad_request", None), answer


def test_every_limit_of_a_generation_is_asked_for_somewhere():
    """A new one belongs into the table, too; those that only the socket has words for stand in `test_limits`."""
    elsewhere = {"MAX_PRIORITY", "MAX_KEEPS", "MAX_KEEP_S", "MAX_PARTS", "MAX_FIELDS"}  # the last two: test_wide_bodies
    there = {name for name in vars(limits) if name.startswith("MAX_")}
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    assert {name for name in there if not re.search(rf'(?<!["A-Z_]){name}\b', text)} == elsewhere


# -- max_tokens beyond the context: a bound, which the socket alone refuses ------------------------------------------


@pytest.mark.parametrize("name", DIALECTS)
async def test_more_tokens_than_the_context_are_the_context(shared, name):
    """opencode asks every model of which it knows no limit for 32,000."""
    asked = json.dumps({"model": "alpha", **DIALECTS[name].spell({"max_tokens": 32_000})})
    status, answer, _ = await shared.post(DIALECTS[name].path, asked.replace('"hi"', '"!echo !stop=1"').encode())
    assert status == 200 and f'"max_tokens": {CONTEXT}' in str(answer), answer


async def test_the_socket_refuses_more_tokens_than_the_context(front):
    wire = await Wire.connect(front.path)
    wire.generate(1, "!stop=1", max_tokens=CONTEXT)
    assert (await wire.until_end(1))[-1].ev == "done"
    wire.generate(2, "!stop=1", max_tokens=CONTEXT + 1)
    assert [(event.ev, event.data["code"]) for event in await wire.until_end(2)] == [("refused", "bad_request")]
    await wire.close()


# -- bodies ----------------------------------------------------------------------------------------------------------

# Where a dialect lets pass what it does not look at.
ROOM = {
    "chat": "metadata", "completions": "metadata", "responses": "client_metadata", "anthropic": "more",
    "ollama chat": "num_gpu", "ollama generate": "num_gpu",
}  # fmt: skip


def with_room(name: str, value: Any) -> Body:
    body = {"model": "alpha", **DIALECTS[name].spell({})}
    if name.startswith("ollama"):
        body["options"][ROOM[name]] = value
    else:
        body[ROOM[name]] = value
    return body


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("name", DIALECTS)
async def test_depth_of_a_body(shared, name):
    outside = 2 if name.startswith("ollama") else 1
    for levels, wanted in ((body_limits.MAX_DEPTH, 200), (body_limits.MAX_DEPTH + 1, 400)):
        status, answer, _ = await shared.post(DIALECTS[name].path, with_room(name, nested(levels - outside)))
        assert status == wanted, answer
    assert DIALECTS[name].code(answer) in ("bad_request", None) and f"{body_limits.MAX_DEPTH} levels" in str(answer)


@pytest.mark.parametrize("name", ["chat", *(pytest.param(name, marks=pytest.mark.long) for name in list(DIALECTS)[1:])])
async def test_values_of_a_body(shared, name):
    def counted(body: Body) -> int:
        text = json.dumps(body)
        return sum(text.count(mark) for mark in "[{,")

    few = counted(with_room(name, [0]))
    for values, wanted in ((body_limits.MAX_VALUES, 200), (body_limits.MAX_VALUES + 1, 400)):
        status, answer, _ = await shared.post(DIALECTS[name].path, with_room(name, [0] * (values - few + 1)))
        assert status == wanted, answer
    assert DIALECTS[name].code(answer) in ("bad_request", None) and f"{body_limits.MAX_VALUES} values" in str(answer)


@pytest.mark.long
@pytest.mark.parametrize("name", DIALECTS)
async def test_size_of_a_body(shared, name):
    few = len(json.dumps(with_room(name, "")))
    for size_bytes, wanted in ((web.MAX_BODY_BYTES, 200), (web.MAX_BODY_BYTES + 1, 413)):
        status, answer, _ = await shared.post(DIALECTS[name].path, with_room(name, "x" * (size_bytes - few)))
        assert status == wanted, answer
    assert DIALECTS[name].code(answer) in ("bad_request", None)


# -- headers ---------------------------------------------------------------------------------------------------------

FIXED = ("Host: localhost", "Connection: close", "Content-Type: application/json", "Content-Length: 2")
FIXED_BYTES = sum(len(line) + 2 for line in FIXED)


def lines(total_bytes: int) -> list[str]:
    """Headers of so many bytes together, line ends counted, none of them too long."""
    few = ["X: " + "x" * 4000] * 3
    return [*few, "X: " + "x" * (total_bytes - sum(len(line) + 2 for line in few) - len("X: ") - 2)]


HEADERS = [
    ("count", [f"X-{number}: 1" for number in range(web.MAX_HEADERS - len(FIXED))],
     [f"X-{number}: 1" for number in range(web.MAX_HEADERS - len(FIXED) + 1)], 400),
    ("value", ["X: " + "x" * web.MAX_HEADER_BYTES], ["X: " + "x" * (web.MAX_HEADER_BYTES + 1)], 400),
    ("total", lines(gate.MAX_HEADERS_BYTES - FIXED_BYTES), lines(gate.MAX_HEADERS_BYTES - FIXED_BYTES + 1), 431),
]  # fmt: skip


@pytest.mark.parametrize(("at", "past", "status"), [one[1:] for one in HEADERS], ids=[one[0] for one in HEADERS])
@pytest.mark.parametrize("name", DIALECTS)
async def test_headers_of_a_request(shared, name, at, past, status):
    """At the limit it is the empty body that is wrong."""

    async def ask(more: list[str]) -> tuple[int, str]:
        head = [f"POST {DIALECTS[name].path} HTTP/1.1", *FIXED, *more]
        answer = (await shared.raw(("\r\n".join(head) + "\r\n\r\n{}").encode())).decode()
        return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]

    told = await ask(at)
    assert told[0] == 400 and "model is missing" in told[1], told
    told = await ask(past)
    assert told[0] == status and "missing" not in told[1], told


# -- requests at once ------------------------------------------------------------------------------------------------


def hanging(name: str) -> Body:
    return json.loads(json.dumps({"model": "alpha", **DIALECTS[name].spell({})}).replace('"hi"', '"!hang"'))


@pytest.mark.parametrize("http", [{"max_streams": 1, "max_queue": 1}], indirect=True)
async def test_one_request_more_than_there_is_room_for(http):
    chat = DIALECTS["chat"].path
    running = [await http.session.post(http.url + chat, json={**hanging("chat"), "stream": True}) for _ in range(2)]
    assert [one.status for one in running] == [200, 200]
    for name, dialect in DIALECTS.items():
        status, answer, headers = await http.post(dialect.path, hanging(name))
        assert status == dialect.busy and dialect.code(answer) in ("overloaded", None), (name, answer)
        assert int(headers["Retry-After"]) > 0 and "x-should-retry" not in headers
    for one in running:
        one.close()


async def test_one_request_more_than_a_key_may_have(http):
    _, text = keys.add(http.front.settings.keys_file, "a", max_requests=1)
    key = {"Authorization": f"Bearer {text}"}
    chat = DIALECTS["chat"].path
    running = await http.session.post(http.url + chat, json={**hanging("chat"), "stream": True}, headers=key)
    assert running.status == 200
    for name, dialect in DIALECTS.items():
        status, answer, headers = await http.post(dialect.path, hanging(name), **key)
        assert status == 429 and dialect.code(answer) in ("quota_exceeded", None), (name, answer)
        assert int(headers["Retry-After"]) > 0
    running.close()
