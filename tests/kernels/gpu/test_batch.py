"""Rows of a pass arranged for the card: decode rows first, chunks after them, spans within pages; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernels.gpu.batch import Range, arrange, check_addresses, range_of
from tierd.kernels.layout import PageLayout

LIMITS = {"page_tokens": 16, "vocab": 1000, "context": 200, "max_rows": 400}


def ints(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def rows(spans: list[tuple[int, int]], spare: int = 0) -> dict[str, np.ndarray]:
    """(first, count) of each sequence, with `spare` pages too many."""
    held = [-(-(first + count) // 16) + spare for first, count in spans]
    at = [(s, first + n) for s, (first, count) in enumerate(spans) for n in range(count)]
    return {
        "tokens": ints([s * 100 + p % 100 for s, p in at]), "positions": ints([p for _, p in at]),
        "row_seq": ints([s for s, _ in at]), "page_offsets": ints(np.cumsum([0, *held])),
        "logit_rows": ints(range(len(at))),
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 2))
def test_every_row_reads_and_writes_its_own_pages(spans: list[tuple[int, int]], spare: int) -> None:
    given_rows = rows(spans, spare)
    found = arrange(**given_rows, **LIMITS)
    assert found.decode_rows == sum(count == 1 for _, count in spans)
    np.testing.assert_array_equal(found.tokens[found.new_rows], given_rows["tokens"])
    np.testing.assert_array_equal(found.positions[found.new_rows], given_rows["positions"])
    np.testing.assert_array_equal(found.new_rows, found.logit_rows)
    offsets, written = given_rows["page_offsets"], {}
    for (row, token, count), place in zip(found.spans.tolist(), found.span_places.tolist(), strict=True):
        assert 1 <= count <= 16 - token
        for n in range(count):
            assert row + n not in written
            written[row + n] = (place, token + n)
    sequence_of = np.empty(len(found.tokens), np.int32)
    sequence_of[found.new_rows] = given_rows["row_seq"]
    for row, position in enumerate(found.positions.tolist()):
        assert written[row] == (offsets[sequence_of[row]] + position // 16, position % 16)
    for n in range(found.decode_rows):
        pages = found.decode_places[found.decode_offsets[n] : found.decode_offsets[n + 1]]
        first, position = offsets[sequence_of[n]], found.positions[n]
        assert found.decode_lengths[n] == position + 1
        np.testing.assert_array_equal(pages, first + np.arange(position // 16 + 1))
    for n in range(len(found.chunk_lengths)):
        row = found.decode_rows + found.chunk_rows[n]
        pages = found.chunk_places[found.chunk_offsets[n] : found.chunk_offsets[n + 1]]
        assert found.chunk_lengths[n] == found.positions[row]
        np.testing.assert_array_equal(pages, offsets[sequence_of[row]] + np.arange(-(-found.positions[row] // 16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ints([1, 2, 1000])}, "tokens must lie in 0..999"),
        ({"positions": ints([0, 2, 0])}, "must follow each other in position"),
        ({"positions": ints([0, 1, 16])}, "row 2 is at position 16, its sequence has 1 pages"),
        ({"row_seq": ints([0, 1, 0])}, "must be adjacent"),
        ({"row_seq": ints([0, 0, 2])}, "row_seq must lie in 0..1"),
        ({"logit_rows": ints([3])}, "logit_rows must lie in 0..2"),
        ({"page_offsets": ints([0, 2, 1])}, "must ascend"),
        ({"tokens": np.zeros(3, np.int64)}, "tokens must be a contiguous int32 vector"),
        ({"tokens": ints([1, 2])}, "2 tokens, but 3 positions"),
    ],
)
def test_refuses(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrange(**{**rows([(0, 2), (0, 1)]), **changes}, **LIMITS)


def test_rows_with_bounds_count_from_their_pages_and_share_their_sinks() -> None:
    """A chunk that begins to be bounded within, a decode row far beyond the tables, and one that sees all."""
    bounds = ints([[40, 20, 2, 0], [32, 4, 1, 256], [0, 0, 0, 0]])
    spans = [list(range(50, 70)), [300], [33]]
    found = arrange(
        tokens=ints([1] * 22), positions=ints([p for span in spans for p in span]), row_seq=ints([0] * 20 + [1, 2]),
        page_offsets=ints([0, 7, 11, 14]), logit_rows=ints([21]), **LIMITS, bounds=bounds, has_far=True,
    )  # fmt: skip
    assert found.positions.tolist() == [300, 33, *range(50, 70)] and found.far.tolist() == [300]
    assert found.angles.tolist() == [200, 33, *range(50, 70)]  # behind a table of 200 positions
    assert found.decode_lengths.tolist() == [300 - 256 + 1, 34] and found.chunk_lengths.tolist() == [50]
    assert found.decode_places.tolist() == [8, 9, 10, 11, 12, 13] and found.chunk_places.tolist() == [2, 3, 4, 5]
    assert found.windows.tolist() == [32, 0] + [0] * 10 + [40] * 10
    sinks = found.sinks
    assert sinks.lengths.tolist() == [4, 0] + [0] * 10 + [20] * 10 and sinks.max_pages == 2
    assert sinks.seen_from.tolist() == [35, 0] + [0] * 10 + [59] * 10
    assert [sinks.places[sinks.offsets[row]] for row in (0, -1)] == [7, 0] and sinks.places.tolist() == [0, 1, 7]
    assert found.span_places.tolist() == [10, 13, 5, 6]


def test_nobody_sees_sinks_before_something_has_left() -> None:
    given_rows = rows([(30, 5)], spare=1)
    found = arrange(**given_rows, **LIMITS, bounds=ints([[32, 4, 1, 0]]))
    assert not len(found.sinks.places) and not found.windows.any() and not len(found.far)
    with pytest.raises(ValueError, match="positions must lie in 0..199"):
        arrange(**rows([(190, 20)], spare=1), **LIMITS, bounds=ints([[32, 4, 1, 0]]))


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a pass takes 1 to 4 rows, got 5"):
        arrange(**rows([(0, 5)]), **{**LIMITS, "max_rows": 4})


def test_pages_lie_aligned_within_memory_that_the_card_reads() -> None:
    layout = PageLayout(2, 1, 16, "bf16")
    memories = [Range(4096, 2 * layout.record_bytes)]
    ends = ints([0, 1])
    check_addresses(np.array([4096], np.int64), ends, memories, layout, range(2))
    check_addresses(np.array([4096 - layout.layer_bytes], np.int64), ends, memories, layout, range(1, 2))
    for address in (4096 + 2 * layout.record_bytes, 0, 4096 + 32, -64):
        with pytest.raises(ValueError, match="page 0: "):
            check_addresses(np.array([address], np.int64), ends, memories, layout, range(2))
    array = np.zeros(100, np.uint8)
    assert range_of(array) == Range(array.ctypes.data, 100) and range_of(memories[0]) == memories[0]
