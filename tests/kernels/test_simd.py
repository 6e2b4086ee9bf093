"""simd: the primitives that have an exact answer, and the exponential within its bound."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tierd.kernels.cpu.simd import (
    exp8,
    keep_lanes,
    load8,
    load8_bf16,
    load8_fp16,
    max8,
    scatter8_bf16,
    scatter8_fp16,
    store8,
    store8_bf16,
    store8_fp16,
    store_f32,
    sum8,
)


@njit(cache=True)
def _run(x, count, exps, halves, brains, kept, folds):
    for i in range(0, count, 8):
        v = load8(x + 4 * i)
        store8(exps + 4 * i, exp8(v))
        store8_fp16(halves + 2 * i, v)
        store8_bf16(brains + 2 * i, v)
        store8(kept + 4 * i, keep_lanes(v, 2, 5, np.float32(-1)))
        store_f32(folds + i, sum8(v))
        store_f32(folds + i + 4, max8(v))


@njit(cache=True)
def _widen(halves, brains, count, out_halves, out_brains, spread_halves, spread_brains):
    for i in range(0, count, 8):
        store8(out_halves + 4 * i, load8_fp16(halves + 2 * i))
        store8(out_brains + 4 * i, load8_bf16(brains + 2 * i))
        scatter8_fp16(spread_halves + 6 * i, 6, load8_fp16(halves + 2 * i))
        scatter8_bf16(spread_brains + 6 * i, 6, load8_bf16(brains + 2 * i))


class Results:
    def __init__(self, values: NDArray[np.float32]) -> None:
        n = len(values)
        self.exps, self.kept = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.halves, self.brains = np.zeros(n, np.float16), np.zeros(n, np.uint16)
        folds = np.zeros((n // 8, 2), np.float32)
        arrays = (self.exps, self.halves, self.brains, self.kept, folds)
        _run(values.ctypes.data, n, *(a.ctypes.data for a in arrays))
        self.sums, self.largest = folds.T


def test_exponential_within_its_bound() -> None:
    x = np.linspace(-87, 88, 80000, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(Results(x).exps / exact - 1) < 2e-7).all()


def test_exponential_at_the_ends() -> None:
    x = np.array([-np.inf, -1000, 0, -0.0, 1, 1000, np.inf, np.nan], np.float32)
    exps = Results(x).exps
    assert 0 < exps[0] == exps[1] < 1e-37
    assert exps[2] == exps[3] == 1
    assert np.isfinite(exps[5]) and exps[5] == exps[6]
    assert np.isnan(exps[7])


def test_rounding_to_half_precision_is_numpys() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * np.float32(100)
    x[:8] = [np.inf, -np.inf, 1e6, 65504, 6e-8, 1e-9, 0, -0.0]
    with np.errstate(over="ignore"):
        assert np.array_equal(Results(x).halves, x.astype(np.float16))


def test_rounding_to_bfloat16_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x[:4] = np.array([0x3F808000, 0x3F818000, 0x7F800000, 0x00000001], np.uint32).view(np.float32)  # ties, inf, tiny
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(Results(x).brains, expected)
    stays_nan = Results(np.full(8, np.array(0x7F800001, np.uint32).view(np.float32))).brains
    assert ((stays_nan & 0x7FFF) > 0x7F80).all()


def test_lanes_that_are_dropped_leave_nothing() -> None:
    x = np.array([np.nan, np.nan, 1, 2, 3, np.inf, np.nan, np.nan], np.float32)
    assert Results(x).kept.tolist() == [-1, -1, 1, 2, 3, -1, -1, -1]


def test_folds_go_in_the_documented_order() -> None:
    x = np.random.default_rng(1).standard_normal((100, 8)).astype(np.float32)
    a = x[:, :4] + x[:, 4:]
    b = a[:, :2] + a[:, 2:]
    results = Results(x.ravel())
    assert np.array_equal(results.sums, b[:, 0] + b[:, 1])
    assert np.array_equal(results.largest, x.max(1))


def test_narrow_loads_and_scattered_stores() -> None:
    x = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    narrow = Results(x)
    halves, brains = np.zeros(64, np.float32), np.zeros(64, np.float32)
    spread_halves, spread_brains = np.zeros((64, 3), np.float16), np.zeros((64, 3), np.uint16)
    arrays = (halves, brains, spread_halves, spread_brains)
    _widen(narrow.halves.ctypes.data, narrow.brains.ctypes.data, 64, *(a.ctypes.data for a in arrays))
    assert np.array_equal(halves, narrow.halves.astype(np.float32))
    assert np.array_equal(brains.view(np.uint32), narrow.brains.astype(np.uint32) << 16)
    assert np.array_equal(spread_halves[:, 0], narrow.halves) and not spread_halves[:, 1:].any()
    assert np.array_equal(spread_brains[:, 0], narrow.brains) and not spread_brains[:, 1:].any()
