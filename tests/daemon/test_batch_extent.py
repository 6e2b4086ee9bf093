"""How large the requests of a batch are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tierd.daemon.batch import CHAT_URL, EMBEDDING_URL, Item
from tierd.daemon.batch_extent import ANSWER_TOKENS, extent_of


def item(number: int, url: str = CHAT_URL, **body: Any) -> Item:
    return Item(number, str(number), str(number), url, json.dumps(body).encode())


def test_means_and_the_longest() -> None:
    items = [item(1, max_tokens=10, prompt="x" * 400), item(2, max_completion_tokens=30, prompt="x" * 400)]
    found = extent_of(items)
    sizes = [len(one.body) for one in items]
    assert found == (2, -(-sum(sizes) // 8), 20, sizes[1] + 30)


@pytest.mark.parametrize("body", [{}, *({"max_tokens": limit} for limit in (None, "many", True, 0))])
def test_without_a_limit_it_is_guessed(body: dict[str, Any]) -> None:
    assert extent_of([item(1, **body)]).answer_tokens == ANSWER_TOKENS


def test_vectors_have_no_answers() -> None:
    assert extent_of([item(1, EMBEDDING_URL, input="x")]).answer_tokens == 1


def test_no_requests() -> None:
    assert extent_of([]).requests == 0
