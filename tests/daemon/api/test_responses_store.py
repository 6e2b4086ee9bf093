"""Responses that are kept: found by their own tenant, in chains, within bounds."""

from __future__ import annotations

import pytest

from tierd.daemon.api.responses_store import Store, Stored
from tierd.daemon.errors import NotFound
from tierd.daemon.protocol import Message


def stored(text, previous=None, tenant="", body=b"{}"):
    return Stored(tenant, previous, (Message("user", text),), body)


def test_a_conversation_is_the_chain_in_order():
    store = Store()
    store.put("a", stored("1"))
    store.put("b", stored("2", "a"))
    store.put("c", stored("3", "b"))
    assert [message.content for message in store.conversation("c", "")] == ["1", "2", "3"]


def test_a_chain_with_a_gap_is_not_found_and_names_the_field():
    store = Store()
    store.put("b", stored("2", "a"))
    with pytest.raises(NotFound) as caught:
        store.conversation("b", "")
    assert caught.value.param == "previous_response_id" and "whole conversation" in (caught.value.hint or "")


def test_another_tenant_finds_nothing_and_takes_nothing_away():
    store = Store()
    store.put("a", stored("1", tenant="key:x"))
    for ask in (lambda: store.get("a", ""), lambda: store.delete("a", "key:y"), lambda: store.conversation("a", "")):
        with pytest.raises(NotFound):
            ask()
    assert store.get("a", "key:x").messages[0].content == "1"


def test_the_least_recently_used_goes_first():
    store = Store(max_responses=2)
    store.put("a", stored("1"))
    store.put("b", stored("2"))
    store.get("a", "")
    store.put("c", stored("3"))
    with pytest.raises(NotFound):
        store.get("b", "")
    assert store.get("a", "") and store.get("c", "") and len(store) == 2


def test_bytes_are_counted_and_not_characters():
    store, surrogate = Store(), chr(0xD800)
    store.put("a", stored("x" * 300))
    ascii_bytes = store.size_bytes
    store.put("b", stored("\N{GRINNING FACE}" * 300 + surrogate))
    assert store.size_bytes - ascii_bytes == ascii_bytes + 3 * 300 + 1


def test_bytes_are_bounded_and_given_back():
    store = Store(max_bytes=5000)
    for number in range(100):
        store.put(str(number), stored("x", body=b"x" * 700))
        assert store.size_bytes <= 5000
    assert 1 < len(store) < 5
    store.put("huge", stored("x" * 6000))
    assert "huge" not in store._kept
    for response_id in list(store._kept):
        store.delete(response_id, "")
    assert store.size_bytes == 0
