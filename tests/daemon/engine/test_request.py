from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.engine.rig import END
from tests.daemon.engine.vocabularies import byte_level
from tierd.daemon.engine.answer import Said
from tierd.daemon.engine.answer_stream import AnswerStream
from tierd.daemon.engine.request import AGING_S, Finish, Request, Times
from tierd.daemon.engine.sampler import Params, Sampler
from tierd.daemon.engine.tool_formats import Dialect, Style


def request(prompt: int = 10, limit: int = 100, arrived_s: float = 50.0, **more: Any) -> Request:
    fields: dict[str, Any] = {
        "id": 1, "serial": 0, "priority": 0, "salt": b"", "prompt_tokens": prompt, "tokens": [1] * prompt,
        "max_total_tokens": limit, "end_ids": frozenset({END}), "sampler": Sampler(Params(), 300, []),
        "stream": AnswerStream(byte_level(), ("stop",)), "times": Times(arrived_s),
    } | more  # fmt: skip
    return Request(**fields)


def lease(tokens: int, device: int = 0, host: int = 0, nvme: int = 0) -> Any:
    return SimpleNamespace(num_tokens=tokens, hit_device=device, hit_host=host, hit_nvme=nvme)


def test_priority_is_worth_waiting() -> None:
    early, late = request(priority=1), request(arrived_s=50.0 + AGING_S + 1)
    assert early.rank < late.rank
    assert request(priority=1).rank > request(arrived_s=50.0 + AGING_S - 1).rank
    assert request(serial=1).rank < request(serial=2).rank


@pytest.mark.parametrize(
    ("found", "hits"),
    [(lease(9, 4, 3, 2), (4, 3, 2)), (lease(14, 8, 4, 2), (8, 2, 0)), (lease(14, 0, 0, 14), (0, 0, 10)),
     (lease(40, 40), (10, 0, 0))],
)  # fmt: skip
def test_hits_are_of_prompt_tokens(found: Any, hits: tuple[int, int, int]) -> None:
    one = request()
    one.covered(found)
    assert one.hits == hits and one.cached_tokens == sum(hits) == min(found.num_tokens, 10)


def test_what_had_to_be_computed_after_a_preemption_is_no_hit() -> None:
    one = request()
    one.covered(lease(8, 8))
    one.accepted = True
    one.covered(lease(10, 0, 0, 10))
    assert one.cached_tokens == 8 and one.hits == (8, 0, 0)  # what it computed itself and found again is no hit
    one.covered(lease(3, 3))
    assert one.cached_tokens == 3 and one.hits == (3, 0, 0)


def test_text_that_waits_for_its_end_is_shown_with_it() -> None:
    one = request(limit=13)
    assert one.append(ord("s"), 51.0) == (Said(""), None)
    assert one.append(ord("t"), 51.1) == (Said(""), None)
    assert one.append(ord("o"), 51.2) == (Said("sto"), Finish.LENGTH)
    assert one.unsent == [ord("s"), ord("t"), ord("o")]


def test_an_end_token_is_counted_and_not_shown() -> None:
    one = request()
    assert one.append(ord("a"), 51.0) == (Said("a"), None)
    assert one.append(END, 51.1) == (Said(""), Finish.STOP)
    assert one.usage().completion_tokens == 2 and one.unsent == [ord("a")]


def test_an_answer_with_calls_ends_with_them() -> None:
    stream = AnswerStream(byte_level(), parser=Dialect(Style.TAGGED, "<c>", "</c>").parser({"f"}))
    one = request(stream=stream)
    for token in b'<c>{"name": "f"}':
        assert one.append(token, 51.0) == (Said(), None)
    said, over = one.append(END, 51.1)  # the call is known with the end alone
    assert over is Finish.TOOL_CALLS and said.calls[0]["name"] == "f"


def test_times() -> None:
    one = request()
    one.covered(lease(4, 4))
    one.times.admitted_s, one.times.started_s = 50.5, 51.0
    for place in range(5):
        one.append(ord("a"), 52.0 + place * 0.1)
    timings = one.timings()
    assert timings.queue_ms == 500.0 and timings.ttft_ms == 2000.0
    assert timings.prefill_tokens_per_s == pytest.approx(6.0) and timings.recomputed == 6
    assert timings.decode_tokens_per_s == pytest.approx(10.0)


def test_a_request_without_a_token_has_no_times() -> None:
    timings = request().timings()
    assert (timings.ttft_ms, timings.queue_ms) == (0, 0)
    assert (timings.decode_tokens_per_s, timings.prefill_tokens_per_s) == (0, 0)
