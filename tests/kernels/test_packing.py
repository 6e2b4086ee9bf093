"""packing: round trips, exact layouts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.decoders import random_k_quants
from tierd.kernels.packing import (
    BLOCK_COLS,
    GROUP_COLS,
    ROUNDED_FORMATS,
    KQuants,
    PackedMatrix,
    WeightFormat,
    pack,
    pack_affine,
    pack_int8_g32,
    pack_k,
    packed_bytes,
    sections,
    unpack,
)

K_FORMATS = [format for format in WeightFormat if format not in ROUNDED_FORMATS]
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
        case WeightFormat.INT4_G32 | WeightFormat.INT5_G32:
            spread = groups.max(2) - groups.min(2)
            half_step = spread / (15 if format is WeightFormat.INT4_G32 else 31) / 2
            return np.repeat(half_step + (spread + np.abs(groups.min(2))) / 1024, GROUP_COLS, 1)
        case _:
            raise ValueError(format)


@pytest.mark.parametrize("format", ROUNDED_FORMATS)
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
    for format, top in ((WeightFormat.INT4_G32, 15), (WeightFormat.INT5_G32, 31)):
        q = rng.integers(0, top + 1, (rows, cols)).astype(np.uint8)
        expected = q * wide + np.repeat(minimum.astype(np.float32), GROUP_COLS, 1)
        assert np.array_equal(unpack(format, pack_affine(format, q, scale, minimum), rows, cols), expected)


def test_bytes_lie_where_the_table_says() -> None:
    """One element of each section, found by hand."""
    rows, cols, r, k = 40, 64, 37, 45
    q = np.zeros((rows, cols), np.uint8)
    scale, minimum = np.zeros((rows, 2), np.float16), np.zeros((rows, 2), np.float16)
    q[r, k], scale[r, 1], minimum[r, 1] = 11, 2.0, -0.5
    data, at = pack_affine(WeightFormat.INT4_G32, q, scale, minimum), sections(WeightFormat.INT4_G32, rows, cols)
    words = data[: at.quants_bytes].view("<u4")
    assert words[(2 * cols // 8 + k // 8) * 16 + r % 16] == 11 << (4 * (k % 8))
    group = (2 * 2 + 1) * 16 + r % 16
    assert data[at.scales_offset :].view("<f2")[group] == 2.0
    assert data[at.minimums_offset :][: at.minimums_bytes].view("<f2")[group] == -0.5
    bytes_q = np.zeros((rows, cols), np.int8)
    bytes_q[r, k] = -7
    assert pack_int8_g32(bytes_q, scale).view(np.int8)[(2 * cols + k) * 16 + r % 16] == -7
    assert np.count_nonzero(words) == 1


@pytest.mark.parametrize("format", K_FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_k_quants_come_back_exactly(format: WeightFormat, rows: int) -> None:
    k = random_k_quants(np.random.default_rng(rows), format, rows, 512)
    scale, minimum = (
        np.repeat(counts * np.repeat(steps.astype(np.float32), counts.shape[1] // 2, 1), 512 // counts.shape[1], 1)
        for steps, counts in ((k.scale_steps, k.scales), (k.minimum_steps, k.minimums))
    )
    data = pack_k(format, k)
    assert data.nbytes == packed_bytes(format, rows, 512)
    assert np.array_equal(unpack(format, data, rows, 512), k.q * scale + minimum)


def test_k_blocks_lie_where_the_table_says() -> None:
    rows, r, k, block = 40, 37, 256 + 77, (2 * 2 + 1) * 160  # 77 is column 5 of chunk 1 of group 2
    q, steps = np.zeros((rows, 512), np.uint8), np.zeros((rows, 2), np.float16)
    scales, minimums = np.zeros((rows, 16), np.int8), np.zeros((rows, 16), np.uint8)
    q[r, k], steps[r, 1], scales[r, 10], minimums[r, 10] = 16 + 11, 0.5, 63, 200
    data = pack_k(WeightFormat.INT5_K, KQuants(q, steps, scales, -steps, minimums))
    at = sections(WeightFormat.INT5_K, rows, 512)
    words = data[: at.quants_bytes].view("<u4").reshape(3, 16, 5, 16)
    assert words[2, 8 + 2, 1, 5] == 11 << 20 and words[2, 8 + 2, 4, 5] == 1 << (16 + 4 + 1)
    assert np.count_nonzero(words) == 2
    for offset, step, count in ((at.scales_offset, 0.5, 63), (at.minimums_offset, -0.5, 200)):
        assert data[offset + block :].view("<f2")[5] == step and data[offset + block + 32 + 2 * 16 + 5] == count


def test_k_quants_that_do_not_fit_are_refused() -> None:
    k = random_k_quants(np.random.default_rng(0), WeightFormat.INT5_K, 4, 256)
    with pytest.raises(ValueError, match="4 bits"):
        pack_k(WeightFormat.INT4_K, replace(k, q=k.q | np.uint8(16)))
    with pytest.raises(ValueError, match="expected a matrix of int8"):
        pack_k(WeightFormat.INT8_K, k)
    with pytest.raises(ValueError, match="scales: got"):
        pack_k(WeightFormat.INT5_K, replace(k, scales=k.scales[:, :4]))
    with pytest.raises(ValueError, match="minimums: expected finite"):
        pack_k(WeightFormat.INT5_K, replace(k, minimum_steps=k.minimum_steps * np.float16(np.inf)))
    with pytest.raises(ValueError, match="groups of 256"):
        packed_bytes(WeightFormat.INT4_K, 16, BLOCK_COLS + GROUP_COLS)
    with pytest.raises(ValueError, match="K-quants only"):
        pack(WeightFormat.INT4_K, gaussian(16, 256))


@pytest.mark.parametrize("format", list(WeightFormat))
def test_sections_start_on_cache_lines_and_do_not_overlap(format: WeightFormat) -> None:
    at = sections(format, 17, 96 if format in ROUNDED_FORMATS else 768)
    assert at.scales_offset % 64 == at.minimums_offset % 64 == at.total_bytes % 64 == 0
    assert at.quants_bytes <= at.scales_offset
    assert at.scales_offset + at.scales_bytes <= at.minimums_offset
    assert at.minimums_offset + at.minimums_bytes <= at.total_bytes


def test_groups_of_equal_values_are_exact_enough() -> None:
    """A spread of 0 makes a scale of 0; the minimum carries the value."""
    w = np.full((3, 32), 0.25, np.float32)
    for format in ROUNDED_FORMATS:
        assert np.abs(unpack(format, pack(format, w), 3, 32) - w).max() < 2e-4
    zero = np.zeros((3, 32), np.float32)
    assert not any(unpack(format, pack(format, zero), 3, 32).any() for format in ROUNDED_FORMATS)


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
    with pytest.raises(ValueError, match="4 bits"):
        pack_affine(WeightFormat.INT4_G32, np.full((4, 32), 16, np.uint8), scale, scale)
    with pytest.raises(ValueError, match="scale: expected"):
        pack_int8_g32(np.zeros((4, 64), np.int8), scale)
    with pytest.raises(ValueError, match="minimum: a value is not finite"):
        pack_affine(WeightFormat.INT4_G32, np.zeros((4, 32), np.uint8), scale, scale * np.float16(np.inf))
    with pytest.raises(ValueError, match="one block of"):
        PackedMatrix(WeightFormat.FP32, 4, 32, np.zeros(10, np.uint8))
