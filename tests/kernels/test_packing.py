"""packing: round trips, exact layouts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernels.packing import (
    GROUP_COLS,
    PackedMatrix,
    WeightFormat,
    pack,
    pack_int4_g32,
    pack_int8_g32,
    packed_bytes,
    sections,
    unpack,
)

SHAPES = [(1, 32), (16, 32), (17, 64), (100, 96), (4097, 32)]


def gaussian(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols)).astype(np.float32)


def error_bound(format: WeightFormat, w: np.ndarray) -> np.ndarray:
    """Half a step of each element, and the rounding of the scales."""
    groups = w.reshape(len(w), -1, GROUP_COLS)
    match format:
        case WeightFormat.FP32:
            return np.zeros_like(w)
        case WeightFormat.BF16:
            return np.abs(w) / 256
        case WeightFormat.INT8:
            return np.broadcast_to(np.abs(w).max(1, keepdims=True) / 253, w.shape)
        case WeightFormat.INT8_G32:
            return np.repeat(np.abs(groups).max(2) / 127 * (0.5 + 127 / 2048), GROUP_COLS, 1)
        case WeightFormat.INT4_G32:
            spread = groups.max(2) - groups.min(2)
            return np.repeat(spread / 15 * 0.5 + (spread + np.abs(groups.min(2))) / 1024, GROUP_COLS, 1)


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_round_trip_within_half_a_step(format: WeightFormat, rows: int, cols: int) -> None:
    w = gaussian(rows, cols)
    data = pack(format, w)
    assert data.nbytes == packed_bytes(format, rows, cols)
    back = unpack(format, data, rows, cols)
    assert (np.abs(back - w) <= error_bound(format, w)).all()


@pytest.mark.parametrize("format", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_formats_without_groups_take_any_number_of_columns(format: WeightFormat) -> None:
    w = gaussian(5, 7)
    assert np.abs(unpack(format, pack(format, w), 5, 7) - w).max() < 0.02


def test_packing_twice_changes_nothing() -> None:
    w = gaussian(20, 64)
    once = unpack(WeightFormat.BF16, pack(WeightFormat.BF16, w), 20, 64)
    assert np.array_equal(unpack(WeightFormat.BF16, pack(WeightFormat.BF16, once), 20, 64), once)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_group_integers_come_back_exactly(rows: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cols = groups * GROUP_COLS
    scale = rng.standard_normal((rows, groups)).astype(np.float16)
    minimum = rng.standard_normal((rows, groups)).astype(np.float16)
    wide = np.repeat(scale.astype(np.float32), GROUP_COLS, 1)
    q8 = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    assert np.array_equal(unpack(WeightFormat.INT8_G32, pack_int8_g32(q8, scale), rows, cols), q8 * wide)
    q4 = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    expected = q4 * wide + np.repeat(minimum.astype(np.float32), GROUP_COLS, 1)
    assert np.array_equal(unpack(WeightFormat.INT4_G32, pack_int4_g32(q4, scale, minimum), rows, cols), expected)


def test_bytes_lie_where_the_table_says() -> None:
    """One element of each section, found by hand."""
    rows, cols, r, k = 40, 64, 37, 45
    q = np.zeros((rows, cols), np.uint8)
    scale, minimum = np.zeros((rows, 2), np.float16), np.zeros((rows, 2), np.float16)
    q[r, k], scale[r, 1], minimum[r, 1] = 11, 2.0, -0.5
    data, at = pack_int4_g32(q, scale, minimum), sections(WeightFormat.INT4_G32, rows, cols)
    words = data[: at.quants_bytes].view("<u4")
    assert words[(2 * cols // 8 + k // 8) * 16 + r % 16] == 11 << (4 * (k % 8))
    group = (2 * 2 + 1) * 16 + r % 16
    assert data[at.scales_offset :].view("<f2")[group] == 2.0
    assert data[at.minimums_offset :][: at.minimums_bytes].view("<f2")[group] == -0.5
    bytes_q = np.zeros((rows, cols), np.int8)
    bytes_q[r, k] = -7
    assert pack_int8_g32(bytes_q, scale).view(np.int8)[(2 * cols + k) * 16 + r % 16] == -7
    assert np.count_nonzero(words) == 1


@pytest.mark.parametrize("format", list(WeightFormat))
def test_sections_start_on_cache_lines_and_do_not_overlap(format: WeightFormat) -> None:
    at = sections(format, 17, 96)
    assert at.scales_offset % 64 == at.minimums_offset % 64 == at.total_bytes % 64 == 0
    assert at.quants_bytes <= at.scales_offset
    assert at.scales_offset + at.scales_bytes <= at.minimums_offset
    assert at.minimums_offset + at.minimums_bytes <= at.total_bytes


def test_groups_of_equal_values_are_exact_enough() -> None:
    """A spread of 0 makes a scale of 0; the minimum carries the value."""
    w = np.full((3, 32), 0.25, np.float32)
    for format in WeightFormat:
        assert np.abs(unpack(format, pack(format, w), 3, 32) - w).max() < 2e-4
    zero = np.zeros((3, 32), np.float32)
    assert not any(unpack(format, pack(format, zero), 3, 32).any() for format in WeightFormat)


@pytest.mark.parametrize("format", [WeightFormat.INT8_G32, WeightFormat.INT4_G32])
def test_part_of_a_group_is_refused(format: WeightFormat) -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        pack(format, gaussian(4, 48))


def test_what_is_refused() -> None:
    w = gaussian(4, 32)
    with pytest.raises(ValueError, match="float32 matrix"):
        pack(WeightFormat.FP32, w.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not finite"):
        pack(WeightFormat.INT8, np.full((1, 32), np.nan, np.float32))
    with pytest.raises(ValueError, match="too large"):
        pack(WeightFormat.INT4_G32, w * np.float32(1e30))
    with pytest.raises(ValueError, match="too large"):
        pack(WeightFormat.BF16, np.full((1, 1), np.finfo(np.float32).max, np.float32))
    with pytest.raises(ValueError, match="rows and columns"):
        sections(WeightFormat.FP32, 0, 4)
    scale = np.ones((4, 1), np.float16)
    with pytest.raises(ValueError, match=r"0\.\.15"):
        pack_int4_g32(np.full((4, 32), 16, np.uint8), scale, scale)
    with pytest.raises(ValueError, match="scale: expected"):
        pack_int8_g32(np.zeros((4, 64), np.int8), scale)
    with pytest.raises(ValueError, match="minimum: a value is not finite"):
        pack_int4_g32(np.zeros((4, 32), np.uint8), scale, scale * np.float16(np.inf))
    with pytest.raises(ValueError, match="one block of"):
        PackedMatrix(WeightFormat.FP32, 4, 32, np.zeros(10, np.uint8))
