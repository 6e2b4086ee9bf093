"""quantize: rows of activations as integers, group by group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.quantize import quantize_row, quantized_row_bytes

ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def quantized(x: NDArray[np.float32]) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Integers in the order of the columns [groups, 32], and scale, sum, sums of the halves [groups, 4]."""
    cols = len(x)
    row = np.zeros(quantized_row_bytes(cols), np.uint8)
    quantize_row(x.ctypes.data, cols, 0, cols, row.ctypes.data)
    stored = row[: 2 * cols].view(np.int16).reshape(-1, 8)
    q = np.empty_like(stored)
    q[:, ORDER] = stored
    return q.reshape(-1, 32), row[2 * cols :].view(np.float32).reshape(-1, 4)


def test_values_are_within_half_a_step() -> None:
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    q, scales = quantized(x)
    error = np.abs(q * scales[:, :1].astype(np.float64) - x.reshape(-1, 32))
    assert (error <= 0.5001 * scales[:, :1]).all()
    assert np.abs(q).max(axis=1).tolist() == [32767] * 3


def test_sums_are_those_of_the_integers() -> None:
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    q, scales = quantized(x)
    sums = q.reshape(-1, 2, 16).sum(axis=2, dtype=np.int32)
    assert np.array_equal(scales[:, 1], scales[:, 0] * sums.sum(axis=1).astype(np.float32))
    assert np.array_equal(scales[:, 2:], scales[:, :1] * sums.astype(np.float32))


def test_zeros_and_values_too_small_to_count_are_zeros() -> None:
    for value in (0.0, 1e-38, 1e-45):
        q, scales = quantized(np.full(32, value, np.float32))
        assert not q.any() and not scales[:, 1:].any()


def test_what_is_not_finite_stays_so() -> None:
    """An infinity or a NaN must not end as a plausible number."""
    for value in (np.inf, -np.inf, np.nan):
        x = np.ones(64, np.float32)
        x[5] = value
        _, scales = quantized(x)
        assert not np.isfinite(scales[0, 0]) and np.isfinite(scales[1]).all()
