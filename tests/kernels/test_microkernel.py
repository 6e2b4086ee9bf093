"""microkernel: tiles, pairs of tiles and panels in registers give the same bits, whatever their number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.kernels.cpu.microkernel import (
    DIRECT_SHAPES,
    FORMAT_CODES,
    dequantize,
    direct,
    tile_pair_product,
    tile_product,
)
from tierd.kernels.packing import WeightFormat, pack, sections, unpack


def tile_sums(tile: np.ndarray, x: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    y = np.full((len(x), 16), np.nan, np.float32) if start is None else start.copy()
    tile_product(
        tile.ctypes.data, tile.strides[0], x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0], tile.shape[0],
        len(x), int(start is not None),
    )  # fmt: skip
    return y


@pytest.mark.parametrize("cols", [0, 1, 16, 65])
def test_a_row_of_a_tile_is_the_same_bits_for_every_count(cols: int) -> None:
    rng = np.random.default_rng(cols)
    tile, x = rng.standard_normal((cols, 16), np.float32), rng.standard_normal((25, max(cols, 1)), np.float32)
    whole = tile_sums(tile, x)
    assert np.abs(whole - x[:, :cols] @ tile).max() < 1e-4
    for rows in range(1, 25):
        assert np.array_equal(tile_sums(tile, x[:rows]), whole[:rows])


def test_sums_that_go_on_are_the_sums_in_one_go() -> None:
    rng = np.random.default_rng(0)
    tile, x = rng.standard_normal((64, 16), np.float32), rng.standard_normal((7, 64), np.float32)
    first = tile_sums(tile[:40], x)
    assert np.array_equal(tile_sums(tile[40:], x[:, 40:], first), tile_sums(tile, x))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_pairs_are_two_tiles(rows: int) -> None:
    rng = np.random.default_rng(rows)
    tiles, x = rng.standard_normal((2, 33, 16), np.float32), rng.standard_normal((rows, 33), np.float32)
    y = np.full((rows, 32), np.nan, np.float32)
    tile_pair_product(
        tiles[0].ctypes.data, tiles[1].ctypes.data, 64, x.ctypes.data, x.strides[0], y.ctypes.data,
        y.ctypes.data + 64, y.strides[0], 33, rows, 0, 0, 1 << 40,
    )  # fmt: skip
    assert np.array_equal(y, np.hstack([tile_sums(tile, x) for tile in tiles]))


@pytest.mark.parametrize("format", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_panels_in_registers_are_dequantized_tiles(format: WeightFormat) -> None:
    rng, cols = np.random.default_rng(0), 96
    w, x = rng.standard_normal((32, cols), np.float32), rng.standard_normal((4, cols), np.float32)
    data, at, code = pack(format, w), sections(format, 32, cols), FORMAT_CODES[format]
    quants, scales = data.ctypes.data, data.ctypes.data + at.scales_offset
    tiles = np.zeros((2, cols, 16), np.float32)
    for p in range(2):
        scale_offset = p * at.scales_bytes // 2
        dequantize(code, quants + p * at.quants_bytes // 2, scales + scale_offset, cols, tiles[p].ctypes.data)
    assert np.array_equal(tiles.transpose(0, 2, 1).reshape(32, cols), unpack(format, data, 32, cols))
    expected = np.hstack([tile_sums(tile, x) for tile in tiles])
    for num_panels, rows in DIRECT_SHAPES:
        y = np.full((rows, 32), np.nan, np.float32)
        direct(
            code, num_panels, rows, quants, at.quants_bytes // 2, scales, at.scales_bytes // 2,
            x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0], cols,
        )  # fmt: skip
        assert np.array_equal(y[:, : 16 * num_panels], expected[:rows, : 16 * num_panels])
