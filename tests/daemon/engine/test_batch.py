from __future__ import annotations

import numpy as np
import pytest

from tierd.daemon.engine.batch import Addresses, Rows, build
from tierd.kernels.rows import Bound


def at(*addresses: int) -> Addresses:
    return np.array(addresses, np.int64)


def test_sequences_stand_end_to_end() -> None:
    batch = build(
        [Rows([7, 8, 9], 3, at(5, 2), True), Rows([1], 0, at(9, 4), False), Rows([6], 8, at(1, 0, 3), True)], 4
    )
    assert batch.tokens.tolist() == [7, 8, 9, 1, 6]
    assert batch.positions.tolist() == [3, 4, 5, 0, 8]
    assert batch.row_seq.tolist() == [0, 0, 0, 1, 2]
    assert batch.pages.tolist() == [5, 2, 9, 1, 0, 3]  # a page that no row needs yet is left out
    assert batch.page_offsets.tolist() == [0, 2, 3, 6]
    assert batch.logit_rows.tolist() == [2, 4]
    for array in (batch.tokens, batch.positions, batch.row_seq, batch.page_offsets, batch.logit_rows):
        assert array.dtype == np.int32 and array.flags.c_contiguous
    assert batch.pages.dtype == np.int64 and batch.pages.flags.c_contiguous


def test_nobody_samples() -> None:
    assert build([Rows([1, 2], 0, at(0), sample=False)], 4).logit_rows.shape == (0,)


@pytest.mark.parametrize("rows", [Rows([], 0, at(1), True), Rows([1, 2], 3, at(1), True)])
def test_rows_without_a_place_are_refused(rows: Rows) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        build([rows], 4)


def test_bounds_are_there_when_somebody_has_one() -> None:
    plain = Rows([1], 4, np.array([8, 16]), 1)
    bounded = Rows([2, 3], 261, np.array([8, 24, 32]), 1, Bound(8, 3, 1, 256))
    assert build([plain], 4).bounds is None
    batch = build([plain, bounded], 4)
    assert batch.bounds is not None and batch.bounds.tolist() == [[0, 0, 0, 0], [8, 3, 1, 256]]
    assert batch.page_offsets.tolist() == [0, 2, 5] and batch.positions.tolist() == [4, 261, 262]
    with pytest.raises(ValueError, match="do not fit 2 pages"):
        build([Rows([2, 3], 261, np.array([8, 24]), 1, Bound(8, 3, 1, 256))], 4)
