"""batch: how attention is cut into parts. What is refused is tested through the decoder, in test_step.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernels.cpu.batch import Addresses, cut_attention
from tierd.kernels.rows import Batch, check_batch

SEGMENT, SEGMENT_PAGES = 256, 16


def batch_of(rows: list[tuple[int, int]], tables: list[list[int]]) -> tuple[Batch, Addresses]:
    """Sequence s has `rows[s]`, (first position, count), and pages at the addresses `tables[s]`."""
    row_seq = np.repeat(np.arange(len(rows)), [count for _, count in rows]).astype(np.int32)
    positions = np.concatenate([np.arange(first, first + count) for first, count in rows]).astype(np.int32)
    offsets = np.cumsum([0] + [len(table) for table in tables]).astype(np.int32)
    batch = Batch(np.zeros_like(row_seq), positions, row_seq, offsets, np.zeros(0, np.int32))
    return batch, np.array([page for table in tables for page in table], np.int64)


def cut_of(rows: list[tuple[int, int]], common: list[int], max_rows: int = 8, few_blocks: int = 0) -> list[list[int]]:
    """The parts for sequences that have their first `common[s]` pages in common with the one before."""
    tables: list[list[int]] = []
    for s, (first, count) in enumerate(rows):
        own = [1000 * s + page for page in range(-(-(first + count) // 16))]
        tables.append(tables[-1][: common[s]] + own[common[s] :] if s else own)
    parts: list[list[int]] = cut_attention(*batch_of(rows, tables), max_rows, few_blocks).parts.tolist()
    return parts


def test_sequences_apart_are_parts_of_their_own_the_last_one_first() -> None:
    assert cut_of([(600, 1), (0, 10), (900, 1)], [0, 0, 0]) == [
        [11, 1, 0, 4, -1], [9, 2, 0, 1, -1], [1, 8, 0, 1, -1], [0, 1, 0, 3, -1],
    ]  # fmt: skip


def test_few_blocks_are_cut_by_segments() -> None:
    assert cut_of([(600, 1)], [0], few_blocks=2) == [[0, 1, 0, 1, 0], [0, 1, 1, 2, 0], [0, 1, 2, 3, 0]]
    assert cut_of([(255, 1)], [0], few_blocks=2) == [[0, 1, 0, 1, -1]]
    assert cut_of([(600, 1)], [0], few_blocks=1) == [[0, 1, 0, 3, -1]]


def test_segments_in_common_are_one_part() -> None:
    """Three sequences: two segments in common, of which the third has one, and tails of their own."""
    assert cut_of([(600, 1), (520, 1), (300, 1)], [0, 33, 31]) == [
        [0, 3, 0, 1, 0], [0, 2, 1, 2, 0], [2, 1, 1, 2, 2], [0, 1, 2, 3, 0], [1, 1, 2, 3, 1],
    ]  # fmt: skip


def test_a_segment_that_a_row_sees_in_part_is_not_in_common() -> None:
    assert cut_of([(600, 1), (254, 1)], [0, 15]) == [[1, 1, 0, 1, -1], [0, 1, 0, 3, -1]]
    assert cut_of([(600, 1), (254, 2)], [0, 16]) == [[1, 2, 0, 1, -1], [0, 1, 0, 3, -1]]
    assert cut_of([(600, 1), (255, 1)], [0, 16])[0] == [0, 2, 0, 1, 0]


def test_parts_in_common_are_bounded() -> None:
    assert cut_of([(256, 1)] * 5, [0] + [16] * 4, max_rows=2)[:3] == [[0, 2, 0, 1, 0], [2, 2, 0, 1, 2], [4, 1, 0, 1, 4]]


def test_full_blocks_of_a_prefill_stay_whole() -> None:
    """Only what is left of its rows joins the decode row behind it."""
    assert cut_of([(512, 19), (700, 1)], [0, 32]) == [
        [8, 8, 0, 3, -1], [0, 8, 0, 3, -1],
        [16, 4, 0, 1, 0], [16, 4, 1, 2, 0], [16, 3, 2, 3, 0], [19, 1, 2, 3, 3],
    ]  # fmt: skip


@given(st.data())
def test_parts_cover_what_every_row_sees_once_and_read_the_same_pages(data: st.DataObject) -> None:
    sequences = data.draw(st.integers(1, 6))
    rows = [(data.draw(st.integers(0, 1100)), data.draw(st.just(1) | st.integers(1, 20))) for _ in range(sequences)]
    # A few addresses for each page, so that tables agree here and there.
    variants = st.sampled_from([0, 0, 0, 1])
    tables = []
    for first, count in rows:
        chosen = [data.draw(variants) for _ in range(8)]
        tables.append([2 * page + chosen[page // 11] for page in range(-(-(first + count) // 16))])
    batch, pages = batch_of(rows, tables)
    check_batch(batch, 1, 2000, 200)
    limit = data.draw(st.integers(1, 9))
    parts, cut_rows = cut_attention(batch, pages, limit, data.draw(st.integers(0, 9)))
    assert parts.dtype == cut_rows.dtype == np.int32 and parts.flags.c_contiguous and cut_rows.flags.c_contiguous
    seen = []
    for first, count, segment, stop, slot in parts.tolist():
        assert 1 <= count <= limit
        members = range(first, first + count)
        if slot < 0:
            assert segment == 0 and not set(members) & set(cut_rows.tolist())
        else:
            assert stop == segment + 1 and cut_rows[slot : slot + count].tolist() == list(members)
        span = slice(segment * SEGMENT_PAGES, stop * SEGMENT_PAGES)
        if len(set(batch.row_seq[first : first + count])) > 1:
            assert len({tuple(tables[batch.row_seq[row]][span]) for row in members}) == 1
            assert min(batch.positions[row] for row in members) + 1 >= stop * SEGMENT
        seen += [(row, s) for row in members for s in range(segment, stop) if s <= batch.positions[row] // SEGMENT]
    assert sorted(seen) == [(r, s) for r, p in enumerate(batch.positions) for s in range(p // SEGMENT + 1)]
