"""From a plan to the integer arrays that the decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.kernels.rows import Bound

Ints = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `tokens` stand at positions `start` and up; `pages` are the addresses of its pages.

    In order; a page at address 0 is streamed: its record is read while the step runs.
    """

    tokens: Sequence[int]
    start: int
    pages: Addresses
    sample: int  # logits are wanted of so many of the last rows
    bound: Bound = Bound()  # what the rows see; it also says which `pages` are given
    observed: int = 0  # it is to be told of so many of the last rows how much they look at each page
    exact: Addresses | None = None  # copies of the pages, 0 for one without (`kernels.rows.Exact`)


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of `CpuDecoder.forward`, apart from the memories. T rows, S sequences, P pages, L wanted logits."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    row_seq: Ints  # [T]
    pages: Addresses  # [P] of all sequences, end to end
    page_offsets: Ints  # [S + 1]
    logit_rows: Ints  # [L]
    bounds: Ints | None = None  # [S, 4], where somebody has one
    observed: Ints | None = None  # the rows that are observed, where there are some
    exact: Addresses | None = None  # [P], where some page has an exact copy


def build(sequences: Sequence[Rows], page_tokens: int) -> Batch:
    """One batch of all sequences, in the order given.

    Raises ValueError when a sequence has no rows, or pages too few for them.
    """
    counts = [len(rows.tokens) for rows in sequences]
    held = [
        rows.bound.lead + -(-(rows.start + count - rows.bound.base) // page_tokens)
        for rows, count in zip(sequences, counts, strict=True)
    ]
    bounds = [rows.bound for rows in sequences]
    for rows, count, needed in zip(sequences, counts, held, strict=True):
        if not count or needed > len(rows.pages):
            raise ValueError(f"{count} rows at {rows.start} do not fit {len(rows.pages)} pages")
    ends = np.cumsum(counts, dtype=np.int32)
    observed = [row for rows, end in zip(sequences, ends, strict=True) for row in range(end - rows.observed, end)]
    return Batch(
        tokens=np.concatenate([np.asarray(rows.tokens, dtype=np.int32) for rows in sequences]),
        positions=np.concatenate(
            [
                np.arange(rows.start, rows.start + count, dtype=np.int32)
                for rows, count in zip(sequences, counts, strict=True)
            ]
        ),
        row_seq=np.repeat(np.arange(len(sequences), dtype=np.int32), counts),
        pages=np.concatenate([rows.pages[:count] for rows, count in zip(sequences, held, strict=True)]),
        page_offsets=np.concatenate([np.zeros(1, np.int32), np.cumsum(held, dtype=np.int32)]),
        logit_rows=np.array(
            [row for rows, end in zip(sequences, ends, strict=True) for row in range(end - rows.sample, end)],
            dtype=np.int32,
        ),
        bounds=np.array(bounds, np.int32) if any(map(any, bounds)) else None,
        observed=np.array(observed, np.int32) if observed else None,
        exact=_exact(sequences, held),
    )


def _exact(sequences: Sequence[Rows], held: Sequence[int]) -> Addresses | None:
    if all(rows.exact is None for rows in sequences):
        return None
    none = np.zeros(max(held), np.int64)
    return np.concatenate(
        [(none if rows.exact is None else rows.exact)[:count] for rows, count in zip(sequences, held, strict=True)]
    )
