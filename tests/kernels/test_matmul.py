"""matmul: against torch, and the same bits for every number of rows and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.decoders import random_matrix
from tierd.kernels import reference
from tierd.kernels.cpu.matmul import MATRIX, TILE_BYTES, describe_matrix, gather_row, matmul, takes_integers
from tierd.kernels.cpu.quantize import quantize_row, quantized_row_bytes
from tierd.kernels.cpu.team import PHASE_WORDS
from tierd.kernels.packing import BLOCK_COLS, GROUP_COLS, ROUNDED_FORMATS, PackedMatrix, WeightFormat, unpack

INTEGER_FORMATS = [format for format in WeightFormat if format not in ("fp32", "bf16", "int8")]
ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 33)


def matrix_of(format: WeightFormat, rows: int, cols: int) -> PackedMatrix:
    """Random weights of about 1; `cols` is rounded up to what the format takes."""
    cols = cols if format in ROUNDED_FORMATS else -(-cols // BLOCK_COLS) * BLOCK_COLS
    return random_matrix(np.random.default_rng(rows + cols), format, rows, cols)


def quantized(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    rows = np.zeros((len(x), quantized_row_bytes(x.shape[1])), np.uint8)
    for source, target in zip(x, rows, strict=True):
        quantize_row(source.ctypes.data, x.shape[1], 0, x.shape[1], target.ctypes.data)
    return rows


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
    source = quantized(x) if takes_integers(record) else x

    def work(thread: int) -> None:
        matmul(
            record, source.ctypes.data, source.strides[0], y.ctypes.data, y.strides[0], target,
            padded_residual.strides[0], len(x), phase.ctypes.data, threads, tiles[thread].ctypes.data,
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
        matrix = matrix_of(format, outputs, cols)
        for rows in ROWS:
            x = np.random.default_rng(rows).standard_normal((rows, matrix.cols)).astype(np.float32)
            weights = reference.weights(matrix).double()
            expected = (torch.from_numpy(x).double() @ weights.T).numpy()
            # Half a step of every group of x, where x is rounded at all.
            steps = np.abs(x).reshape(rows, -1, GROUP_COLS).max(axis=2) / 32767 * (format in INTEGER_FORMATS)
            rounding = steps / 2 @ weights.abs().numpy().reshape(outputs, -1, GROUP_COLS).sum(axis=2).T
            assert (np.abs(multiply(matrix, x) - expected) < 1e-4 + rounding).all()


@pytest.mark.parametrize("format", list(WeightFormat))
def test_a_row_is_the_same_bits_in_every_batch(format: WeightFormat) -> None:
    matrix = matrix_of(format, 72, 608)
    # Two blocks of rows, the second not full.
    x = np.random.default_rng(0).standard_normal((197, matrix.cols)).astype(np.float32)
    together = multiply(matrix, x)
    for rows in (*ROWS, 100):
        assert np.array_equal(multiply(matrix, x[-rows:]), together[-rows:])
    assert np.array_equal(multiply(matrix, x, threads=3), together)
    assert np.array_equal(multiply(matrix, x[:2], threads=3), together[:2])


def test_sums_go_in_ascending_order_with_fused_steps() -> None:
    """The contract to the bit, for one output: a chain of fma in float32, emulated in double precision."""
    matrix = matrix_of(WeightFormat.FP32, 16, 300)
    w = unpack(WeightFormat.FP32, matrix.data, 16, 300)
    x = np.random.default_rng(0).standard_normal((1, 300)).astype(np.float32)
    total = np.float32(0)
    for k in range(300):
        # The product is exact in double, and the sum's double rounding differs from fma's in one of 2**29 cases.
        total = np.float32(np.float64(w[3, k]) * np.float64(x[0, k]) + np.float64(total))
    assert multiply(matrix, x)[0, 3] == total


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_nothing_but_x_is_rounded(format: WeightFormat) -> None:
    """Beyond the rounding of x to 16 bits there is only that of float32."""
    matrix = matrix_of(format, 16, 96)
    x = np.random.default_rng(0).standard_normal((1, matrix.cols)).astype(np.float32)
    w = unpack(format, matrix.data, 16, matrix.cols)[3].astype(np.float64)
    groups = x.reshape(-1, GROUP_COLS)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    rounded = np.rint(groups * (np.float32(32767) / largest)).astype(np.float64)
    exact = (rounded * (largest / np.float32(32767))).reshape(-1)
    assert abs(multiply(matrix, x)[0, 3] - exact @ w) < 2e-6


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_bias_and_residual(rows: int) -> None:
    matrix = matrix_of(WeightFormat.INT8_G32, 40, 64)
    rng = np.random.default_rng(rows)
    x, bias = rng.standard_normal((rows, 64)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    residual = rng.standard_normal((rows, 40)).astype(np.float32)
    plain = multiply(matrix, x)
    assert np.array_equal(multiply(matrix, x, bias), plain + bias)
    assert np.array_equal(multiply(matrix, x, bias, residual), residual + (plain + bias))
    assert np.array_equal(multiply(matrix, x, None, residual), residual + plain)


@pytest.mark.parametrize("format", list(WeightFormat))
def test_gathered_rows_are_the_unpacked_weights(format: WeightFormat) -> None:
    matrix = matrix_of(format, 37, 64)
    record = np.zeros((), MATRIX)[()]
    describe_matrix(matrix, record)
    expected, row = unpack(format, matrix.data, 37, matrix.cols), np.zeros(matrix.cols, np.float32)
    for index in (0, 7, 15, 16, 36):
        gather_row(record, index, row.ctypes.data)
        assert np.array_equal(row, expected[index])


def test_no_rows_are_no_work() -> None:
    matrix = matrix_of(WeightFormat.FP32, 16, 8)
    assert multiply(matrix, np.zeros((0, 8), np.float32)).shape == (0, 16)
