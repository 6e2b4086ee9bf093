"""Structured output of the real model: whatever it is asked and however it is drawn, it fits."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.counts import counted
from tests.daemon.engine.live import Live
from tests.daemon.engine.schemas import schema
from tierd.daemon.engine.guide import Patience
from tierd.daemon.protocol import Event, Format, Message, Sampling, Submit, Tool

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = ("Invent one.", "Tell me about Rome.", "x", "Write a poem in \u65e5\u672c\u8a9e, no JSON please!", '{"a":')
BATCH = 12
MAX_TOKENS = 160
PARTS = counted(12, 3)
PART = 42
FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4"))


@FORMATS.checks("time")
def _is_time(value: object) -> bool:
    """`full-time` of RFC 3339, section 5.6: jsonschema's own knows no offsets and no fractions."""
    clock, offset = r"([01]\d|2[0-3]):[0-5]\d", r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
    return re.fullmatch(rf"{clock}:([0-5]\d|60)(\.\d+)?{offset}", str(value), re.IGNORECASE) is not None


@pytest.fixture(scope="module")
def live(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Live(model_dir, tmp_path_factory.mktemp("structured"), device=400, nvme=0, max_streams=BATCH) as engine:
        # Threads that begin with their first work begin here, not in the test that happens to be the first.
        engine.engine.intake.guides.compiler.submit(int).result(10.0)
        engine.engine.intake.guides._masks.begin(Patience(), int).result(10.0)  # type: ignore[arg-type]
        yield engine


def ask(live: Live, submits: list[Submit]) -> list[tuple[str, Event, list[dict[str, Any]]]]:
    """The answers: text, terminal event, calls."""
    intake, loop = live.engine.intake, live.engine.loop
    live._number += len(submits)
    numbers = range(live._number - len(submits) + 1, live._number + 1)
    for number, submit in zip(numbers, submits, strict=True):
        loop.submit(intake.request(number, submit, time.monotonic()))
    texts: dict[int, str] = dict.fromkeys(numbers, "")
    calls: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    ends: dict[int, Event] = {}
    while len(ends) < len(submits):
        event = live.events.get(timeout=120.0)
        if event.id in texts and event.ev == "text":
            texts[event.id] += event.data["text"]
            calls[event.id] += event.data.get("calls", [])
        elif event.id in texts and event.ev in ("done", "failed"):
            ends[event.id] = event
    return [(texts[number], ends[number], calls[number]) for number in numbers]


def submit(number: int, **more: Any) -> Submit:
    sampling = more.pop("sampling", Sampling(temperature=1.0, seed=number, max_tokens=MAX_TOKENS))
    return Submit("m", messages=(Message("user", PROMPTS[number % len(PROMPTS)]),), sampling=sampling, **more)


def check(live: Live, numbers: Sequence[int], turn: int = 0) -> list[int]:
    """The numbers of the answers that the limit cut; all others are valid."""
    schemas = [schema(number) for number in numbers]
    submits = [
        submit(
            number, format=Format("json_schema", json.dumps(one)),
            sampling=Sampling(temperature=1.0, seed=number + 10_000 * turn, max_tokens=MAX_TOKENS),
        )
        for number, one in zip(numbers, schemas, strict=True)
    ]
    cut = []
    for number, one, (text, end, _) in zip(numbers, schemas, ask(live, submits), strict=True):
        assert end.ev == "done", (number, end)
        if end.data["finish"] == "length":
            cut.append(number)
            continue
        assert end.data["finish"] == "stop"
        jsonschema.validate(json.loads(text), one, format_checker=FORMATS)
    return cut


def test_answers_fit_their_schemas(live: Live) -> None:
    assert len(check(live, range(6))) <= 1


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_many_answers_fit_their_schemas(live: Live, part: int) -> None:
    cut = []
    for first in range(1000 + part * PART, 1000 + (part + 1) * PART, PART // 2):
        cut += check(live, range(first, first + PART // 2))
    print(f"{PART} schemas, {len(cut)} answers longer than {MAX_TOKENS} tokens")
    assert len(cut) <= PART // 8
    for turn in range(1, 4):  # a number may have digits without end, where the dice fall so: drawn anew
        cut = check(live, cut, turn)
    assert not cut


def test_a_limit_cuts_an_answer(live: Live) -> None:
    form = Format("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "string", "minLength": 99}},
                                             "required": ["a"]}))  # fmt: skip
    [(text, end, _)] = ask(live, [submit(1, format=form, sampling=Sampling(temperature=1.0, seed=1, max_tokens=9))])
    assert end.data["finish"] == "length" and text.startswith('{"a": "')


def test_the_other_formats(live: Live) -> None:
    forms = [Format("json_object"), Format("regex", r"\d{4}-\d\d-\d\d"), Format("grammar", 'start: "yes" | "no"')]
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=40)
    answers = ask(live, [submit(0, format=form, sampling=sampling) for form in forms])
    texts = [text for text, _, _ in answers]
    assert texts[0].startswith('{"') or texts[0] == "{}"
    assert len(texts[1]) == 10 and texts[2] in ("yes", "no")
    assert [end.data["finish"] for _, end, _ in answers[1:]] == ["stop", "stop"]


def test_a_resumed_answer_goes_on_as_it_would_have(live: Live) -> None:
    one = submit(3, format=Format("json_schema", json.dumps(schema(3))))
    intake, loop = live.engine.intake, live.engine.loop
    live._number += 2
    found = {}
    loop.submit(intake.request(live._number - 1, one, time.monotonic()))
    found[0] = live.collect(live._number - 1)[live._number - 1][0]
    half = tuple(found[0][: len(found[0]) // 2])
    again = Submit("m", messages=one.messages, sampling=one.sampling, format=one.format, resume=half)
    loop.submit(intake.request(live._number, again, time.monotonic()))
    found[1] = live.collect(live._number)[live._number][0]
    assert [*half, *found[1]] == found[0] and half


@pytest.mark.long
def test_being_held_costs_little_speed(model_dir: Path, tmp_path: Path) -> None:
    properties = {
        "bio": {"type": "string", "minLength": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 50},
    }
    form = Format("json_schema", json.dumps({"type": "object", "properties": properties}))
    rates: dict[bool, list[float]] = {True: [], False: []}
    # JSON repeats itself: what speculation gains with it would hide what masks cost.
    with Live(model_dir, tmp_path, device=100, nvme=0, max_streams=1, speculate="off") as live:
        for seed in range(10):
            sampling = Sampling(temperature=1.0, seed=seed, max_tokens=60, ignore_eos=True)
            for held in (True, False) if seed % 2 else (False, True):
                [(_, end, _)] = ask(live, [submit(0, format=form if held else None, sampling=sampling)])
                rates[held].append(end.data["timings"].decode_tokens_per_s)
    ratio = statistics.median(held / free for held, free in zip(rates[True], rates[False], strict=True))
    medians = {held: statistics.median(found) for held, found in rates.items()}
    print(f"decode speed held / free: {ratio:.3f} ({medians[True]:.0f} and {medians[False]:.0f} tokens/s)")
    assert ratio >= 0.9


def test_a_call_is_not_for_this_model(live: Live) -> None:
    from tierd.daemon.errors import Unsupported

    with pytest.raises(Unsupported, match="call tools"):
        ask(live, [submit(0, tools=(Tool("f"),))])
