"""codes: vectors from and to codes of 8 and 4 bits, against torch and against arithmetic of single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from tierd.kernels import reference
from tierd.kernels.cpu.codes import (
    hadamard8,
    larger8,
    largest8,
    load8_fp8,
    load8_high4,
    load8_int8,
    load8_low4,
    min8,
    scatter8_fp8,
    scatter8_int4,
    scatter8_int8,
    store8_fp8,
    store8_int8,
    store16_int4,
)
from tierd.kernels.cpu.simd import load8, splat, store8

Floats = NDArray[np.float32]


@njit
def _load(x, out):
    store8(out, load8_int8(x))
    store8(out + 32, load8_low4(x))
    store8(out + 64, load8_high4(x))
    store8(out + 96, load8_fp8(x))


@njit
def _store(x, row, column):
    v, w = load8(x), load8(x + 32)
    store8_int8(row, v)
    store8_fp8(row + 8, v)
    store16_int4(row + 16, v, w)
    scatter8_int8(column, 4, v)
    scatter8_fp8(column + 1, 4, v)
    scatter8_int4(column + 2, 4, 0, v)
    scatter8_int4(column + 2, 4, 4, w)


@njit
def _fold(x):
    v = load8(x)
    return largest8(larger8(v, splat(np.float32(0)))), min8(v)


@njit
def _hadamard(x):
    store8(x, hadamard8(load8(x)))


def stored(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """16 floats as int8, fp8 (the first eight) and codes of 4 bits: in a row [24], and in columns [8, 4]."""
    row, columns = np.zeros(24, np.uint8), np.full((8, 4), 0xA5, np.uint8)
    x = x.astype(np.float32)
    _store(x.ctypes.data, row.ctypes.data, columns.ctypes.data)
    return row, columns


def test_every_code_is_read() -> None:
    for first in range(0, 256, 8):
        codes, out = np.arange(first, first + 8, dtype=np.uint8), np.empty((4, 8), np.float32)
        _load(codes.ctypes.data, out.ctypes.data)
        assert np.array_equal(out[0], codes.view(np.int8))
        assert np.array_equal(out[1], codes & 15) and np.array_equal(out[2], codes >> 4)
        expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        assert np.array_equal(out[3], expected, equal_nan=True)
        assert np.array_equal(np.signbit(out[3][out[3] == 0]), np.signbit(expected[expected == 0]))


def test_codes_are_rounded_to_even_and_held_in_range() -> None:
    x = np.array([-200, -127.4, -2.5, -0.5, 1.5, 2.5, 127.6, 3, *([-1, 0.5, 7.5, 8.5, 14.6, 15.4, 99, 2])])
    row, columns = stored(x)
    assert row[:8].view(np.int8).tolist() == [-127, -127, -2, 0, 2, 2, 127, 3]
    assert (row[16:] & 15).tolist() == [0, 0, 0, 0, 2, 2, 15, 3]
    assert (row[16:] >> 4).tolist() == [0, 0, 8, 8, 15, 15, 15, 2]
    assert np.array_equal(columns[:, 0], row[:8]) and np.array_equal(columns[:, 2], row[16:])
    assert (columns[:, 3] == 0xA5).all()


@pytest.mark.parametrize("scale", [1.0, 1e-2, 2e-3, 100.0, 300.0])
def test_fp8_is_rounded_as_torch_rounds(scale: float) -> None:
    x = (scale * np.random.default_rng(0).standard_normal(16)).astype(np.float32)
    row, columns = stored(x)
    held = torch.from_numpy(x[:8]).clamp(-reference.FP8_MAX, reference.FP8_MAX)
    assert np.array_equal(row[8:16], held.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    assert np.array_equal(columns[:, 1], row[8:16])


def test_the_largest_magnitude_and_the_smallest_number() -> None:
    x = np.array([1, -7, 3, 0, 5, -2, 6.5, 2], np.float32)
    assert _fold(x.ctypes.data) == (7, -7)
    for wrong in (np.inf, -np.inf, np.nan, -np.nan):
        x[5] = wrong
        assert not np.isfinite(_fold(x.ctypes.data)[0])


def test_hadamard() -> None:
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    expected = np.sqrt(8) * reference.turned(torch.from_numpy(x), 8).numpy()
    _hadamard(x.ctypes.data)
    assert np.abs(x - expected).max() < 1e-6
