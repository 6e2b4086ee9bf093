"""The rows of one pass, and what must be true of them on every backend; plain numpy."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.layout import PAGE_TOKENS

Ints = NDArray[np.int32]


class Batch(NamedTuple):
    """Index arrays of one pass, see `CpuDecoder.forward` and `GpuDecoder.forward`."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    row_seq: Ints  # [rows]
    page_offsets: Ints  # [sequences + 1]
    logit_rows: Ints  # [logits]


def check_batch(batch: Batch, vocab: int, context: int, max_rows: int, page_tokens: int = PAGE_TOKENS) -> None:
    """Raises ValueError for a batch whose kernels would read or write outside of what they are given.

    It speaks of `page_offsets[-1]` pages; whether these are there is for whoever knows their addresses.
    """
    check_rows(batch, vocab, max_rows)
    check_positions(batch, context, page_tokens)


def check_rows(batch: Batch, vocab: int, max_rows: int) -> None:
    """The part of `check_batch` that has nothing to do with positions."""
    for name, array in batch._asdict().items():
        check_vector(name, array, np.int32)
    tokens, positions, row_seq, page_offsets, logit_rows = batch
    rows, sequences = len(tokens), len(page_offsets) - 1
    if not 1 <= rows <= max_rows:
        raise ValueError(f"a pass takes 1 to {max_rows} rows, got {rows}")
    if len(positions) != rows or len(row_seq) != rows:
        raise ValueError(f"{rows} tokens, but {len(positions)} positions and {len(row_seq)} sequence numbers")
    if len(logit_rows) > max_rows:
        raise ValueError(f"a pass gives at most {max_rows} rows of logits, got {len(logit_rows)}")
    _check_range("tokens", tokens, vocab)
    _check_range("row_seq", row_seq, sequences)
    _check_range("logit_rows", logit_rows, rows)
    if page_offsets[0] < 0 or (page_offsets[1:] < page_offsets[:-1]).any():
        raise ValueError("page_offsets must ascend from 0 or more")
    if rows - int((row_seq[1:] == row_seq[:-1]).sum()) != len(np.unique(row_seq)):
        raise ValueError("the rows of a sequence must be adjacent")


def check_positions(batch: Batch, context: int, page_tokens: int = PAGE_TOKENS) -> None:
    """The rest of `check_batch`."""
    _, positions, row_seq, page_offsets, _ = batch
    _check_range("positions", positions, context)
    pages = (page_offsets[1:] - page_offsets[:-1])[row_seq]
    if (positions // page_tokens >= pages).any():
        row = int(np.argmax(positions // page_tokens >= pages))
        raise ValueError(f"row {row} is at position {positions[row]}, its sequence has {pages[row]} pages")
    same = row_seq[1:] == row_seq[:-1]
    if (same & (positions[1:] <= positions[:-1])).any():
        raise ValueError("the rows of a sequence must ascend in position")


class Bound(NamedTuple):
    """What the rows of one sequence see, where that is less than all: a row of the `bounds` of a pass.

    A row at p sees p - window + 1 .. p, and with sinks, from p = sinks + window on, also 0 .. sinks - 1, those as if it
    stood at sinks + window - 1. (Before that it sees all.) A layer's own window takes its part of both.

    The pages of the sequence are `lead` pages with the sinks, from the first on, and then those that begin at token
    `base`. What its rows don't see may be any page.
    """

    window: int = 0  # tokens; 0: all that the pages hold
    sinks: int = 0
    lead: int = 0
    base: int = 0  # with a window a multiple of BASE_TOKENS, else of a page


class Ladder(NamedTuple):
    """Which tokens a row sees exact beside packed pages: a row at p sees 0 .. first - 1 and `block(p)` .. p.

    So it follows from a row's position alone. Both are multiples of `LADDER_STEP`; a block is `last` tokens.
    """

    first: int
    last: int

    def block(self, position: int) -> int:
        """The first token of the block that a position lies in."""
        return position // self.last * self.last


class Exact(NamedTuple):
    """Exact copies of some pages of a pass: records of `COPY_FORMAT` (on a card of what it computes with), whose keys
    are turned as those of packed pages are.

    Of a page that has one, this is what rows read, and rows that are written into the page are written into it as well.
    Both pages of a step of attention (32 tokens from a multiple of 32 on) have one, or none has; where a sequence ends
    with the first of them there is no second.
    """

    pages: NDArray[np.int64]  # addresses of the copies, one for each page; 0: it has none
    memory: Any  # that they lie in: an array, or a range of addresses on a card


COPY_FORMAT = "fp16"
LADDER_STEP = 32  # what attention reads at a time: two pages
_STEP_PAGES = LADDER_STEP // PAGE_TOKENS
BASE_TOKENS = 256  # sums of attention begin anew there: bits must not depend on where the pages begin
MAX_POSITION = 1 << 30


def check_bounds(batch: Batch, bounds: Ints, context: int, far: bool, page_tokens: int = PAGE_TOKENS) -> None:
    """Raises ValueError for bounds [sequences, 4] that do not fit a batch, whose own faults are for `check_batch`.

    `context`: positions that there are tables for; `far`: whether rows may stand beyond them.
    """
    sequences = len(batch.page_offsets) - 1
    if bounds.shape != (sequences, len(Bound._fields)) or bounds.dtype != np.int32 or not bounds.flags.c_contiguous:
        raise ValueError(f"bounds must be contiguous int32 [{sequences}, 4], got {bounds.dtype} {bounds.shape}")
    window, sinks, lead, base = bounds.T.astype(np.int64)
    if bounds.size and bounds.min() < 0:
        raise ValueError("bounds must not be negative")
    if (sinks > lead * page_tokens).any() or ((sinks > 0) & (window == 0)).any():
        raise ValueError("sinks need a window, and pages before the others")
    if (sinks + window)[sinks > 0].max(initial=0) > context:
        raise ValueError(f"sinks and their window must lie within the {context} positions of the tables")
    if (base % np.where(window > 0, BASE_TOKENS, page_tokens)).any():
        raise ValueError(f"pages must begin at a multiple of {BASE_TOKENS} tokens, or of a page without a window")
    row_window, row_base = window[batch.row_seq], base[batch.row_seq]
    first = np.where(row_window > 0, batch.positions - row_window + 1, batch.positions)
    first[first <= sinks[batch.row_seq]] = 0
    if (first < row_base).any():
        row = int(np.argmax(first < row_base))
        raise ValueError(f"row {row} sees token {first[row]}, its pages begin at {row_base[row]}")
    _check_range("positions", batch.positions, MAX_POSITION if far else context)


class Placed(NamedTuple):
    """A checked batch as the kernels take it: positions count from where each sequence's pages begin, and those pages
    begin at `page_offsets`, behind the ones with sinks.

    Each of `records` [rows, 5] is of one row: the window that it has beside its layer's (0: none), sinks that it sees,
    the position they are seen from, its own position, and the row of the tables with its angles; below 0 it is row
    -1 - angles of tables for the `far` positions alone. None: nobody is bounded.
    """

    batch: Batch
    records: Ints | None = None
    sink_offsets: Ints | None = None  # [sequences]
    far: Ints | None = None
    exact: Exact | None = None


def place(batch: Batch, bounds: Ints | None, vocab: int, context: int, max_rows: int, has_far: bool) -> Placed:
    """Checks a batch (see `check_batch`, `check_bounds`) and resolves its bounds."""
    if bounds is None:
        check_batch(batch, vocab, context, max_rows)
        return Placed(batch)
    check_rows(batch, vocab, max_rows)
    check_bounds(batch, bounds, context, has_far)
    window, sinks, lead, base = np.ascontiguousarray(bounds.T)
    local = batch.positions - base[batch.row_seq]
    check_positions(batch._replace(positions=local + PAGE_TOKENS * lead[batch.row_seq]), 2 * MAX_POSITION)
    starts = batch.page_offsets.copy()
    starts[:-1] += lead
    row_window, row_sinks = window[batch.row_seq], sinks[batch.row_seq]
    seen_from = row_sinks + row_window - 1
    shifted = (row_sinks == 0) | (batch.positions > seen_from)
    far = np.flatnonzero(batch.positions >= context)
    angles = batch.positions.copy()
    angles[far] = -1 - np.arange(len(far), dtype=np.int32)
    columns = (row_window * shifted, row_sinks * shifted, seen_from, batch.positions, angles)
    return Placed(
        batch._replace(positions=local, page_offsets=starts), np.stack(columns, 1, dtype=np.int32),
        batch.page_offsets[:-1].copy(), batch.positions[far],
    )  # fmt: skip


def check_observed(rows: Ints, placed: Placed) -> None:
    """Raises ValueError for rows to be observed that the pass does not have, and for such with a window."""
    check_vector("observed", rows, np.int32)
    count = len(placed.batch.positions)
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError(f"rows {rows.min()} to {rows.max()} are to be observed, the pass has {count}")
    if placed.records is not None and placed.records[rows, :2].any():
        raise ValueError("a row with a window can't be observed")


def check_exact(exact: Exact, page_offsets: Ints, bounds: Ints | None) -> None:
    """Raises ValueError for copies that are not there by whole steps, or that belong to a sequence with a bound. Where
    they lie is for whoever knows their format."""
    check_vector("exact pages", exact.pages, np.int64)
    if len(exact.pages) != page_offsets[-1]:
        raise ValueError(f"page_offsets speak of {page_offsets[-1]} pages, got {len(exact.pages)} exact ones")
    there = exact.pages != 0
    for sequence, (first, stop) in enumerate(itertools.pairwise(page_offsets.tolist())):
        of_one = there[first:stop]
        if bounds is not None and bounds[sequence].any() and of_one.any():
            raise ValueError("rows with a bound have no exact copies")
        whole = len(of_one) // _STEP_PAGES * _STEP_PAGES
        if (of_one[:whole:_STEP_PAGES] != of_one[1:whole:_STEP_PAGES]).any():
            raise ValueError(f"of {_STEP_PAGES} pages that are read together one has an exact copy, and one has none")


def check_vector(name: str, array: NDArray[np.integer], dtype: type[np.integer]) -> None:
    """Raises ValueError unless it is a contiguous vector of that type."""
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a contiguous {np.dtype(dtype)} vector, got {array.dtype} {array.shape}")


def _check_range(name: str, values: Ints, bound: int) -> None:
    """Raises ValueError unless all values lie in 0..bound-1. (As unsigned numbers the negative ones are large.)"""
    if len(values) and int(values.view(np.uint32).max()) >= bound:
        raise ValueError(f"{name} must lie in 0..{bound - 1}, got {values.min()}..{values.max()}")
