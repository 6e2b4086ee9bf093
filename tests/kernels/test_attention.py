"""attention: against torch over shapes, formats, windows and page boundaries; no influence of what isn't seen."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierd.kernels import reference
from tierd.kernels.cpu.attention import (
    ATTENTION_PHASES,
    SEGMENT_TOKENS,
    attention,
    max_block_queries,
    scratch_bytes,
    sums_bytes,
)
from tierd.kernels.cpu.batch import cut_attention
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.pages import page_values
from tierd.kernels.cpu.team import PHASE_WORDS
from tierd.kernels.layout import PAGE_FORMATS, PageLayout
from tierd.kernels.rows import Batch

BOUND = 1e-5
LAYERS, LAYER = 2, 1  # the layer tested is not the first, so that offsets count


@dataclass
class Case:
    """Queries of some rows over pages filled at random, everything that no row may see being NaN."""

    layout: PageLayout
    arena: NDArray[np.uint8]
    tables: list[list[int]]
    queries: NDArray[np.float32]  # [rows, heads, head_dim]
    rows: list[tuple[int, int]]  # (sequence, position)
    window: int = 0
    sink_logits: NDArray[np.float32] | None = None  # [heads]

    def expected(self) -> NDArray[np.float32]:
        keys, values = reference.pages(self.arena, self.layout, LAYER)
        tables = [self.tables[s] for s, _ in self.rows]
        positions = [p for _, p in self.rows]
        q = torch.from_numpy(self.queries)
        sink_logits = None if self.sink_logits is None else torch.from_numpy(self.sink_logits)
        return reference.attention(q, keys, values, positions, tables, self.window, sink_logits).numpy()

    def alone(self, row: int) -> Case:
        return Case(
            self.layout, self.arena, self.tables, self.queries[row : row + 1].copy(), self.rows[row : row + 1],
            self.window, self.sink_logits,
        )  # fmt: skip

    def run(self, head_parts: int = 1, by_segments: bool = False) -> NDArray[np.float32]:
        """One thread walks the phases alone; the arguments only say how the items are cut."""
        layout, (rows, heads, head_dim) = self.layout, self.queries.shape
        batch = Batch(
            np.zeros(rows, np.int32),
            np.array([p for _, p in self.rows], np.int32),
            np.array([s for s, _ in self.rows], np.int32),
            np.cumsum([0] + [len(table) for table in self.tables]).astype(np.int32),
            np.zeros(0, np.int32),
        )
        slots = np.array([slot for table in self.tables for slot in table])
        pages = self.arena.ctypes.data + slots * self.arena.shape[1]
        group = heads // layout.kv_heads
        few_blocks = rows + 1 if by_segments else 0
        parts, cut_rows = cut_attention(batch, pages, max_block_queries(head_dim, group) // group, few_blocks)
        turned = reference.turned(torch.from_numpy(self.queries), layout.rotation).float().numpy()
        scaled = (turned * np.float32(1 / np.sqrt(head_dim))).reshape(rows, -1)
        out = np.full_like(scaled, np.nan)
        phases = np.zeros(ATTENTION_PHASES * PHASE_WORDS, np.int64)
        scratch = np.full(scratch_bytes(head_dim, group), 0xFF, np.uint8)
        segments = int(batch.positions.max()) // SEGMENT_TOKENS + 1
        sums = np.full(sums_bytes(head_dim, heads, len(cut_rows), segments), 0xFF, np.uint8)
        job = np.zeros((), JOB)[()]
        values = {
            "heads": heads, "kv_heads": layout.kv_heads, "head_dim": head_dim, "head_parts": head_parts,
            **page_values(layout),
            "block_queries": max_block_queries(head_dim, group), "qkv": scaled.ctypes.data,
            "qkv_stride": scaled.strides[0], "attended": out.ctypes.data, "attended_stride": out.strides[0],
            "rows": rows, "positions": batch.positions.ctypes.data, "row_seq": batch.row_seq.ctypes.data,
            "pages": pages.ctypes.data, "page_offsets": batch.page_offsets.ctypes.data,
            "parts": parts.ctypes.data, "num_parts": len(parts), "segments": segments, "sums": sums.ctypes.data,
            "cut_rows": cut_rows.ctypes.data, "num_cut_rows": len(cut_rows),
        }  # fmt: skip
        for name, value in values.items():
            job[name] = value
        sink_logits = 0 if self.sink_logits is None else self.sink_logits.ctypes.data
        attention(job, LAYER, self.window, sink_logits, phases.ctypes.data, scratch.ctypes.data)
        return out.reshape(rows, heads, head_dim)


def make_case(
    rows: list[tuple[int, int]],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    format: str = "fp32",
    window: int = 0,
    seed: int = 0,
    common: tuple[int, ...] = (),
) -> Case:
    """The first `common[s]` pages of sequence s are those of the sequence before it."""
    rng = np.random.default_rng(seed)
    layout = PageLayout(LAYERS, kv_heads, head_dim, format)
    sequences = max(s for s, _ in rows) + 1
    lengths = [max(p for s, p in rows if s == q) + 1 for q in range(sequences)]
    free = rng.permutation(sum(-(-length // 16) for length in lengths) + 2).tolist()
    tables = [[free.pop() for _ in range(-(-length // 16))] for length in lengths]
    for s, pages in enumerate(common):
        tables[s][:pages] = tables[s - 1][:pages]
    arena = np.full((sum(map(len, tables)) + 2, layout.record_bytes), 0xFF, np.uint8)
    for table, length in zip(tables, lengths, strict=True):
        keys, values = (
            torch.from_numpy(rng.standard_normal((kv_heads, length, head_dim)).astype(np.float32)) for _ in range(2)
        )
        for page, slot in enumerate(table):
            tokens = slice(16 * page, min(16 * page + 16, length))
            record = torch.from_numpy(arena[slot])
            reference.put_tokens(record, layout, LAYER, keys[:, tokens], values[:, tokens], 0)
    queries = (2 * rng.standard_normal((len(rows), heads, head_dim))).astype(np.float32)
    return Case(layout, arena, tables, queries, rows, window)


def span(sequence: int, first: int, stop: int) -> list[tuple[int, int]]:
    return [(sequence, position) for position in range(first, stop)]


@pytest.mark.parametrize("format", list(PAGE_FORMATS))
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_matches_torch(format: str, heads: int, kv_heads: int, head_dim: int) -> None:
    rows = span(0, 20, 61) + span(1, 0, 5) + span(2, 99, 100)
    case = make_case(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, format=format)
    assert np.abs(case.run() - case.expected()).max() < BOUND


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000])
def test_windows(window: int) -> None:
    case = make_case(span(0, 30, 75) + span(1, 3, 4), window=window)
    assert np.abs(case.run() - case.expected()).max() < BOUND


@pytest.mark.parametrize("position", [0, 1, 7, 8, 14, 15, 16, 17, 31, 32, 33])
def test_page_boundaries_with_stale_memory_beyond(position: int) -> None:
    """What lies behind the position, in its page and in other slots, is NaN in `make_case`."""
    case = make_case([(0, position)])
    assert np.abs(case.run() - case.expected()).max() < BOUND


def test_tokens_before_the_window_have_no_influence() -> None:
    case = make_case(span(0, 60, 70), window=20)
    keys, values = reference.pages(case.arena, case.layout, LAYER)
    expected = case.run()
    for token in range(60 - 19):
        for plane in (keys, values):
            plane[case.tables[0][token // 16], :, token % 16] = float("nan")
    assert np.array_equal(case.run(), expected)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("by_segments", [False, True])
def test_many_segments(by_segments: bool, window: int) -> None:
    """Blocks that lie in one segment, reach over two, and end with one."""
    rows = span(0, 250, 262) + span(1, 1030, 1034) + span(2, 511, 512) + span(3, 3, 6)
    case = make_case(rows, heads=6, kv_heads=2, window=window)
    assert np.abs(case.run(2, by_segments) - case.expected()).max() < BOUND


@pytest.mark.parametrize(
    ("format", "window"),
    [*product(["fp32", "fp16", "bf16"], [0, 1, 40, 256, 300, 520]), ("k8v4", 0), ("k8v4", 300)],
)
def test_sequences_with_common_pages(format: str, window: int) -> None:
    """Decode rows whose windows start anywhere, in any order, and a chunk of prefill in their midst."""
    rows = [(0, 900), (1, 511), (2, 1100), *span(3, 760, 774), (4, 600), (5, 512), (6, 300)]
    case = make_case(rows, heads=6, kv_heads=2, window=window, format=format, common=(0, 32, 32, 40, 37, 32, 5))
    together = case.run()
    assert np.abs(together - case.expected()).max() < BOUND
    for row in range(len(rows)):
        assert np.array_equal(case.alone(row).run()[0], together[row])


def test_common_pages_that_a_row_sees_in_part_have_no_influence_beyond_it() -> None:
    """The pages of two sequences are the same, but one row stands within the second segment: what lies behind its
    position is NaN for it alone."""
    case = make_case([(0, 300), (1, 700)], common=(0, 19))
    keys, values = reference.pages(case.arena, case.layout, LAYER)
    expected = case.alone(0).run()[0]
    for token in range(301, 304):
        for plane in (keys, values):
            plane[case.tables[0][token // 16], :, token % 16] = float("nan")
    assert np.array_equal(case.run()[0], expected)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(span(0, 0, 40))
    case.queries *= np.float32(200)
    assert np.isfinite(case.run()).all()
    assert np.abs(case.run() - case.expected()).max() < 1e-3


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_row_is_the_same_bits_in_every_batch(data: st.DataObject) -> None:
    """Any rows of any sequences that may start with the same pages, in any cut, against each row alone."""
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (6, 2), (7, 1), (9, 3)]))
    lengths = data.draw(st.lists(st.integers(1, 70) | st.integers(250, 600), min_size=1, max_size=6))
    rows = [
        row
        for s, length in enumerate(lengths)
        for row in span(s, length - min(length, data.draw(st.just(1) | st.integers(1, 70))), length)
    ]
    common = [0]
    for before, length in pairwise(lengths):  # full pages alone: what one doesn't reach would be stale for the other
        common.append(min(data.draw(st.integers(0, 40)), before // 16, length // 16))
    case = make_case(
        rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([16, 64, 128])),
        format=data.draw(st.sampled_from(list(PAGE_FORMATS))),
        window=data.draw(st.sampled_from([0, 5, 16, 33, 270])),
        common=tuple(common),
    )
    together = case.run(data.draw(st.integers(1, heads)), data.draw(st.booleans()))
    assert np.isfinite(together).all()
    for index in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5)):
        alone = case.alone(index).run(data.draw(st.integers(1, heads)), data.draw(st.booleans()))
        assert np.array_equal(alone[0], together[index])


@pytest.mark.parametrize("window", [0, 300])
def test_a_sink_logit_counts_once_however_rows_are_cut(window: int) -> None:
    rows = [(0, 5), (0, 700), (0, 701), (1, 40)]
    case = make_case(rows, heads=6, kv_heads=2, window=window)
    plain = case.run()
    case.sink_logits = np.array([-3, -0.5, 0, 0.5, 3, 300], np.float32)
    found = case.run()
    assert np.abs(found - case.expected()).max() < BOUND
    assert np.abs(found - plain).max() > 0.1 and np.abs(found[:, 5]).max() < 1e-30
    for head_parts, by_segments in ((2, False), (3, True), (6, True)):
        np.testing.assert_array_equal(case.run(head_parts, by_segments), found)
    for row in range(len(rows)):
        np.testing.assert_array_equal(case.alone(row).run()[0], found[row])
