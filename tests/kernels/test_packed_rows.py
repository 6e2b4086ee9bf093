"""Single rows of packed matrices are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.kernels import packing
from tierd.kernels.packed_rows import unpack_rows
from tierd.kernels.packing import PackedMatrix, WeightFormat


@pytest.mark.parametrize("format", packing.ROUNDED_FORMATS)
def test_rows_are_those_of_the_whole(format: WeightFormat) -> None:
    w = np.random.default_rng(0).standard_normal((53, 64)).astype(np.float32)
    matrix = PackedMatrix(format, 53, 64, packing.pack(format, w))
    rows = np.array([52, 0, 17, 17, 16], np.int32)
    assert np.array_equal(unpack_rows(matrix, rows), packing.unpack(format, matrix.data, 53, 64)[rows])
    assert unpack_rows(matrix, rows[:0]).shape == (0, 64)
    with pytest.raises(IndexError, match=r"0\.\.52"):
        unpack_rows(matrix, np.array([53], np.int32))
