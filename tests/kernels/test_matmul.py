"""matmul: against torch, and the same bits for every number of rows and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierd.kernels import reference
from tierd.kernels.cpu.matmul import MATRIX, TILE_BYTES, describe_matrix, gather_row, matmul
from tierd.kernels.cpu.team import PHASE_WORDS
from tierd.kernels.packing import PackedMatrix, WeightFormat, pack, unpack

ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 33)


def random_matrix(format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    w = np.random.default_rng(rows + cols).standard_normal((rows, cols)).astype(np.float32)
    return PackedMatrix(format, rows, cols, pack(format, w))


def multiply(
    matrix: PackedMatrix,
    x: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """The phase as `threads` threads run it; rows of zeros of the last panel must come out as zeros."""
    record = np.zeros((), MATRIX)[()]
    describe_matrix(matrix, record)
    padded = int(record["panels"]) * 16
    padded_bias, padded_residual = np.zeros(padded, np.float32), np.zeros((len(x), padded), np.float32)
    if bias is not None:
        padded_bias[: matrix.rows] = bias
        record["bias"] = padded_bias.ctypes.data
    if residual is not None:
        padded_residual[:, : matrix.rows] = residual
    y = np.full((len(x), padded), np.nan, np.float32)
    phase = np.zeros(PHASE_WORDS, np.int64)
    tiles = np.zeros((threads, TILE_BYTES), np.uint8)
    target = 0 if residual is None else padded_residual.ctypes.data

    def work(thread: int) -> None:
        matmul(
            record, x.ctypes.data, x.strides[0], y.ctypes.data, y.strides[0], target, padded_residual.strides[0],
            len(x), phase.ctypes.data, threads, tiles[thread].ctypes.data,
        )  # fmt: skip

    others = [threading.Thread(target=work, args=(i,)) for i in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()
    out = y if residual is None else padded_residual
    assert not out[:, matrix.rows :].any()
    return out[:, : matrix.rows]


@pytest.mark.parametrize("format", list(WeightFormat))
def test_matches_torch_for_every_number_of_rows(format: WeightFormat) -> None:
    for outputs, cols in ((40, 64), (200, 608)):  # less than a tile of columns; more than two
        matrix = random_matrix(format, outputs, cols)
        for rows in ROWS:
            x = np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)
            expected = torch.from_numpy(x).double() @ reference.weights(matrix).double().T
            assert np.abs(multiply(matrix, x) - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("format", list(WeightFormat))
def test_a_row_is_the_same_bits_in_every_batch(format: WeightFormat) -> None:
    matrix = random_matrix(format, 72, 608)
    x = np.random.default_rng(0).standard_normal((197, 608)).astype(np.float32)  # two blocks of rows, a part block
    together = multiply(matrix, x)
    for rows in (*ROWS, 100):
        assert np.array_equal(multiply(matrix, x[-rows:]), together[-rows:])
    assert np.array_equal(multiply(matrix, x, threads=3), together)
    assert np.array_equal(multiply(matrix, x[:2], threads=3), together[:2])


def test_sums_go_in_ascending_order_with_fused_steps() -> None:
    """The contract to the bit, for one output: a chain of fma in float32, emulated in double precision."""
    matrix = random_matrix(WeightFormat.FP32, 16, 300)
    w = unpack(WeightFormat.FP32, matrix.data, 16, 300)
    x = np.random.default_rng(0).standard_normal((1, 300)).astype(np.float32)
    total = np.float32(0)
    for k in range(300):
        # The product is exact in double, and the sum's double rounding differs from fma's in one of 2**29 cases.
        total = np.float32(np.float64(w[3, k]) * np.float64(x[0, k]) + np.float64(total))
    assert multiply(matrix, x)[0, 3] == total


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_bias_and_residual(rows: int) -> None:
    matrix = random_matrix(WeightFormat.INT8_G32, 40, 64)
    rng = np.random.default_rng(rows)
    x, bias = rng.standard_normal((rows, 64)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    residual = rng.standard_normal((rows, 40)).astype(np.float32)
    plain = multiply(matrix, x)
    assert np.array_equal(multiply(matrix, x, bias), plain + bias)
    assert np.array_equal(multiply(matrix, x, bias, residual), residual + (plain + bias))
    assert np.array_equal(multiply(matrix, x, None, residual), residual + plain)


@pytest.mark.parametrize("format", list(WeightFormat))
def test_gathered_rows_are_the_unpacked_weights(format: WeightFormat) -> None:
    matrix = random_matrix(format, 37, 64)
    record = np.zeros((), MATRIX)[()]
    describe_matrix(matrix, record)
    expected, row = unpack(format, matrix.data, 37, 64), np.zeros(64, np.float32)
    for index in (0, 7, 15, 16, 36):
        gather_row(record, index, row.ctypes.data)
        assert np.array_equal(row, expected[index])


def test_no_rows_are_no_work() -> None:
    matrix = random_matrix(WeightFormat.FP32, 16, 8)
    assert multiply(matrix, np.zeros((0, 8), np.float32)).shape == (0, 16)
