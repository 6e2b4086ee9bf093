"""batch: how rows are cut into blocks. What is refused is tested through the decoder, in test_step.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernels.cpu.batch import Batch, check_batch, row_blocks


def batch_of(counts: list[int]) -> Batch:
    """`counts[s]` rows of each sequence s, from position 0 on."""
    rows = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
    pages = np.array([-(-n // 16) for n in counts])
    offsets = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    return Batch(np.zeros_like(rows), positions, rows, offsets, np.zeros(0, np.int32))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.integers(1, 9))
def test_blocks_cover_every_row_once_within_one_sequence(counts: list[int], limit: int) -> None:
    batch = batch_of(counts)
    check_batch(batch, 1, 100, 200)
    blocks = row_blocks(batch, limit)
    assert blocks.dtype == np.int32 and blocks.flags.c_contiguous
    covered = [row for first, count in blocks for row in range(first, first + count)]
    assert covered == list(range(sum(counts)))
    for first, count in blocks:
        assert 1 <= count <= limit
        assert len(set(batch.row_seq[first : first + count])) == 1
    assert len(blocks) == sum(-(-n // limit) for n in counts)
