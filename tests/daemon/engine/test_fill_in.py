from __future__ import annotations

import pytest

from tierd.daemon.engine.fill_in import fill_in

QWEN = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|file_sep|>": 4, "<|im_start|>": 5}


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_the_parts_stand_around_the_tokens() -> None:
    form = fill_in(QWEN)
    assert form is not None and form.tokens(encode, "a", "b") == [1, ord("a"), 2, ord("b"), 3]
    assert form.end_ids == {1, 2, 3, 4}


def test_a_suffix_may_come_first() -> None:
    form = fill_in({"[PREFIX]": 1, "[SUFFIX]": 2})
    assert form is not None and form.tokens(encode, "a", "b") == [2, ord("b"), 1, ord("a")]


@pytest.mark.parametrize("added", [{}, {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}])
def test_a_vocabulary_without_the_tokens(added: dict[str, int]) -> None:
    assert fill_in(added) is None
