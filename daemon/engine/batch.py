"""From a plan to the integer arrays that the decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `tokens` stand at positions `start` and up; `slots` are its device pages in order."""

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]
    sample: bool  # whether the logits of the last row are wanted


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of `CpuDecoder.forward`, apart from the arena. T rows, S sequences, P pages, L wanted logits."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    row_seq: Ints  # [T]
    page_table: Ints  # [P] slots of all sequences, end to end
    page_offsets: Ints  # [S + 1]
    logit_rows: Ints  # [L]


def build(sequences: Sequence[Rows], page_tokens: int) -> Batch:
    """One batch of all sequences, in the order given.

    Raises ValueError when a sequence has no rows, or pages too few for them.
    """
    counts = [len(rows.tokens) for rows in sequences]
    for rows, count in zip(sequences, counts, strict=True):
        if not count or (rows.start + count) > len(rows.slots) * page_tokens:
            raise ValueError(f"{count} rows at {rows.start} do not fit {len(rows.slots)} pages")
    ends = np.cumsum(counts, dtype=np.int32)
    pages = [-(-(rows.start + count) // page_tokens) for rows, count in zip(sequences, counts, strict=True)]
    table = [np.asarray(rows.slots[:held], dtype=np.int32) for rows, held in zip(sequences, pages, strict=True)]
    return Batch(
        tokens=np.concatenate([np.asarray(rows.tokens, dtype=np.int32) for rows in sequences]),
        positions=np.concatenate(
            [
                np.arange(rows.start, rows.start + count, dtype=np.int32)
                for rows, count in zip(sequences, counts, strict=True)
            ]
        ),
        row_seq=np.repeat(np.arange(len(sequences), dtype=np.int32), counts),
        page_table=np.concatenate(table),
        page_offsets=np.concatenate([np.zeros(1, np.int32), np.cumsum(pages, dtype=np.int32)]),
        logit_rows=np.array(
            [end - 1 for rows, end in zip(sequences, ends, strict=True) if rows.sample], dtype=np.int32
        ),
    )
