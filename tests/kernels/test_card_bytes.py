"""Bytes on a card are those that its matrices take."""

from __future__ import annotations

import pytest

from tierd.kernels import card_bytes


def test_known_sizes() -> None:
    # 4 bits and two halves for 32 columns, of whole panels and pairs.
    assert card_bytes.matrix_bytes("int4-g32", 4096, 4096) == 4096 * 4096 // 2 + 4096 * 128 * 4
    assert card_bytes.matrix_bytes("int4-g32", 33, 65) == 64 * 128 // 2 + 64 * 4 * 4
    assert card_bytes.matrix_bytes("int8-g32", 4096, 4096) == 4096 * 4096 + 4096 * 128 * 2
    assert card_bytes.matrix_bytes("int4-k", 16, 256) == 16 * 256 * 2


@pytest.mark.parametrize("format", ["int4-g32", "int8-g32", "bf16"])
def test_all_are_dense_for_wide_activations(format: str) -> None:
    assert card_bytes.matrix_bytes(format, 64, 64, 4) == 64 * 64 * 4
