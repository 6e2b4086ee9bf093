"""Events between the engine's reader and a client's task."""

from __future__ import annotations

import asyncio

import pytest
from tierd.daemon.errors import Draining
from tierd.daemon.mailbox import EngineLost, Mailbox, SlowReader
from tierd.daemon.protocol import Event


def text(words, *tokens):
    return Event(1, "text", {"text": words, "tokens": list(tokens)})


async def test_waiting_text_is_joined_and_order_is_kept():
    mailbox = Mailbox()
    for event in (Event(1, "accepted"), text("a", 1), text("b", 2, 3), Event(1, "done")):
        mailbox.put(event)
    assert [(await mailbox.get(1)).ev for _ in range(1)] == ["accepted"]
    assert (await mailbox.get(1)).data == {"text": "ab", "tokens": [1, 2, 3]}
    assert (await mailbox.get(1)).ev == "done"


async def test_only_the_newest_progress_waits():
    mailbox = Mailbox()
    for done in range(1000):
        mailbox.put(Event(1, "progress", {"done": done}))
    assert (await mailbox.get(1)).data["done"] == 999
    with pytest.raises(TimeoutError):
        await mailbox.get(0.01)


async def test_nothing_comes_after_the_terminal_event():
    mailbox = Mailbox()
    for event in (Event(1, "done"), Event(1, "failed"), text("x", 1)):
        mailbox.put(event)
    mailbox.lose()
    assert (await mailbox.get(1)).ev == "done"
    with pytest.raises(EngineLost):
        await mailbox.get(1)


async def test_what_came_before_a_loss_is_delivered():
    mailbox = Mailbox()
    mailbox.put(text("x", 1))
    mailbox.lose()
    mailbox.put(text("y", 2))
    assert (await mailbox.get(1)).data["text"] == "x"
    with pytest.raises(EngineLost):
        await mailbox.get(1)


async def test_a_reader_that_stands_still_costs_a_bounded_amount():
    mailbox = Mailbox(max_bytes=1000)
    for _ in range(100):
        mailbox.put(text("x" * 100, 1))
    assert not mailbox._pending
    with pytest.raises(SlowReader):
        await mailbox.get(1)


async def test_bytes_are_given_back_when_taken():
    mailbox = Mailbox(max_bytes=1000)
    for _ in range(100):
        mailbox.put(text("x" * 100, 1))
        mailbox.put(text("y" * 100, 1))
        await mailbox.get(1)
    assert mailbox._pending_bytes == 0


async def test_an_error_of_the_daemon_ends_it():
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.get(5))
    await asyncio.sleep(0)
    mailbox.fail(Draining("bye"))
    with pytest.raises(Draining):
        await waiting
