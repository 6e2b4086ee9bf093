"""Events between the engine's reader and a client's task."""

from __future__ import annotations

import asyncio

import pytest

from tierd.daemon.errors import Draining
from tierd.daemon.inbox import EngineLost, Inbox, SlowReader
from tierd.daemon.protocol import Event


def text(words, *tokens):
    return Event(1, "text", {"text": words, "tokens": list(tokens)})


async def test_waiting_text_is_joined_and_order_is_kept():
    inbox = Inbox()
    for event in (Event(1, "accepted"), text("a", 1), text("b", 2, 3), Event(1, "done")):
        inbox.put(event)
    assert [(await inbox.get(1)).ev for _ in range(1)] == ["accepted"]
    assert (await inbox.get(1)).data == {"text": "ab", "tokens": [1, 2, 3]}
    assert (await inbox.get(1)).ev == "done"


async def test_only_the_newest_progress_waits():
    inbox = Inbox()
    for done in range(10_000):
        assert inbox.put(Event(1, "progress", {"done": done})), "what was replaced still counts"
    assert (await inbox.get(1)).data["done"] == 9999
    with pytest.raises(TimeoutError):
        await inbox.get(0.01)


async def test_nothing_comes_after_the_terminal_event():
    inbox = Inbox()
    for event in (Event(1, "done"), Event(1, "failed"), text("x", 1)):
        inbox.put(event)
    inbox.lose()
    assert (await inbox.get(1)).ev == "done"
    with pytest.raises(EngineLost):
        await inbox.get(1)


async def test_what_came_before_a_loss_is_delivered():
    inbox = Inbox()
    inbox.put(text("x", 1))
    inbox.lose()
    inbox.put(text("y", 2))
    assert (await inbox.get(1)).data["text"] == "x"
    with pytest.raises(EngineLost):
        await inbox.get(1)


async def test_a_reader_that_stands_still_costs_a_bounded_amount():
    inbox = Inbox(max_bytes=1000)
    for _ in range(100):
        inbox.put(text("x" * 100, 1))
    assert not inbox._pending
    with pytest.raises(SlowReader):
        await inbox.get(1)


async def test_bytes_are_given_back_when_taken():
    inbox = Inbox(max_bytes=1000)
    for _ in range(100):
        inbox.put(text("x" * 100, 1))
        inbox.put(text("y" * 100, 1))
        await inbox.get(1)
    assert inbox._pending_bytes == 0


async def test_an_error_of_the_daemon_ends_it():
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.get(5))
    await asyncio.sleep(0)
    inbox.fail(Draining("bye"))
    with pytest.raises(Draining):
        await waiting


def kind(**data):
    return Event(1, "text", {"text": "", "tokens": [1], **data})


async def test_texts_of_one_kind_are_joined_with_all_that_they_say():
    inbox = Inbox()
    top = [{"logprob": -1.0, "top": []}]
    for event in (kind(thinking="a", thinking_tokens=1, logprobs=top),
                  kind(thinking="b", thinking_tokens=1, logprobs=top), kind(text="c"), kind(text="d"),
                  kind(calls=[{"index": 0, "id": "x", "name": "f"}]),
                  kind(calls=[{"index": 0, "arguments": "{}"}])):  # fmt: skip
        inbox.put(event)
    both = {"text": "", "tokens": [1, 1], "thinking": "ab", "thinking_tokens": 2, "logprobs": top * 2}
    assert (await inbox.get(1)).data == both
    assert (await inbox.get(1)).data == {"text": "cd", "tokens": [1, 1]}
    assert [piece.get("arguments") for piece in (await inbox.get(1)).data["calls"]] == [None, "{}"]
    assert inbox._pending_bytes == 0


async def test_what_says_two_things_or_belongs_to_another_answer_is_told_apart():
    for one, other in ((kind(text="a", thinking="b"), kind(text="a", thinking="b")),
    (kind(text="a"), kind(thinking="b")),
                       (kind(text="a", choice=0), kind(text="a", choice=1))):  # fmt: skip
        inbox = Inbox()
        inbox.put(one)
        inbox.put(other)
        assert (await inbox.get(1)) == one and (await inbox.get(1)) == other
    inbox = Inbox()
    for _ in range(2):
        inbox.put(kind(text="a", choice=3))
    assert (await inbox.get(1)).data == {"text": "aa", "tokens": [1, 1], "choice": 3}


async def test_logprobs_and_calls_count_against_the_bound():
    logprobs, calls = [{"logprob": -1.0, "top": [{}] * 20}], [{"index": 0, "arguments": "x" * 400}]
    for said in ({"logprobs": logprobs}, {"calls": calls}):
        inbox = Inbox(max_bytes=2000)
        for _ in range(5):
            inbox.put(kind(**said))
        with pytest.raises(SlowReader):
            await inbox.get(1)


async def test_the_one_too_many_is_told_once():
    inbox = Inbox(max_bytes=200)
    told = [inbox.put(text("x" * 50, number)) for number in range(10)]
    assert told.count(False) == 1 and told[0]
    with pytest.raises(SlowReader):
        await inbox.get(1)
