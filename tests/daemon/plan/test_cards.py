"""Cards by name."""

from __future__ import annotations

import pytest

from tierd.daemon.errors import BadRequest
from tierd.daemon.plan.cards import CARDS, find_card


@pytest.mark.parametrize("text", ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_names(text: str) -> None:
    assert find_card(text).name == "rtx4090"


def test_an_unknown_card_is_told_apart() -> None:
    with pytest.raises(BadRequest) as caught:
        find_card("rtx4099")
    assert "rtx40" in (caught.value.hint or "")


def test_sizes_are_in_bytes_and_seconds() -> None:
    card = CARDS["rtx4090"]
    assert (card.memory_bytes, card.bytes_per_s) == (24 << 30, 1008e9)
    assert 31e9 < card.link_bytes_per_s < 32e9
    for card in CARDS.values():
        # A card computes between 30 and 700 operations for each byte that its memory gives.
        assert 30 < card.fp16_flops / card.bytes_per_s < 700, card.name
