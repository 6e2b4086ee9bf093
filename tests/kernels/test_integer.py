"""integer: tiles hold what panels hold, and every count of rows gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.decoders import random_matrix
from tests.kernels.test_matmul import INTEGER_FORMATS, quantized
from tierd.kernels.cpu.integer import MAX_TILE_GROUP_BYTES, direct_integer, expand, integer_tile_product
from tierd.kernels.cpu.microkernel import FORMAT_CODES
from tierd.kernels.packing import WeightFormat, sections

COLS = 512
GROUPS = COLS // 32


def packed(format: WeightFormat) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """A panel, and the addresses of its quants, scales and minimums."""
    data, at = random_matrix(np.random.default_rng(0), format, 16, COLS).data, sections(format, 16, COLS)
    return data, (data.ctypes.data, data.ctypes.data + at.scales_offset, data.ctypes.data + at.minimums_offset)


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_a_tile_gives_the_bits_of_the_panel_for_every_count_of_rows(format: WeightFormat) -> None:
    data, addresses = packed(format)
    code = FORMAT_CODES[format]
    tile = np.zeros(GROUPS * MAX_TILE_GROUP_BYTES, np.uint8)
    expand(code, *addresses, GROUPS, tile.ctypes.data)
    x = quantized(np.random.default_rng(1).standard_normal((13, COLS)).astype(np.float32))
    alone = np.full((13, 16), np.nan, np.float32)
    for row, y in zip(x, alone, strict=True):
        direct_integer(code, *addresses, row.ctypes.data, row.ctypes.data + 2 * COLS, GROUPS, y.ctypes.data)
    for rows in range(1, 14):
        y = np.full((rows, 16), np.nan, np.float32)
        integer_tile_product(
            code, tile.ctypes.data, x.ctypes.data, x.ctypes.data + 2 * COLS, x.strides[0], y.ctypes.data, y.strides[0],
            GROUPS, rows, 0,
        )  # fmt: skip
        assert np.array_equal(y, alone[:rows])
    assert data.any()


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_sums_that_go_on_are_the_sums_in_one_go(format: WeightFormat) -> None:
    data, addresses = packed(format)
    code, at = FORMAT_CODES[format], sections(format, 16, COLS)
    x = quantized(np.random.default_rng(1).standard_normal((3, COLS)).astype(np.float32))
    half = GROUPS // 2
    pieces, y = [], np.zeros((2, 3, 16), np.float32)
    section_bytes = (at.quants_bytes, at.scales_bytes, at.minimums_bytes)
    for piece in (0, 1):
        tile = np.zeros(half * MAX_TILE_GROUP_BYTES, np.uint8)
        starts = [a + piece * size // 2 for a, size in zip(addresses, section_bytes, strict=True)]
        expand(code, *starts, half, tile.ctypes.data)
        pieces.append(tile)
    whole = np.zeros(GROUPS * MAX_TILE_GROUP_BYTES, np.uint8)
    expand(code, *addresses, GROUPS, whole.ctypes.data)
    for target, tiles, groups in ((y[0], [whole], GROUPS), (y[1], pieces, half)):
        for i, tile in enumerate(tiles):
            integer_tile_product(
                code, tile.ctypes.data, x.ctypes.data + 64 * groups * i, x.ctypes.data + 2 * COLS + 16 * groups * i,
                x.strides[0], target.ctypes.data, target.strides[0], groups, 3, i,
            )  # fmt: skip
    assert np.array_equal(y[0], y[1]) and data.any()
