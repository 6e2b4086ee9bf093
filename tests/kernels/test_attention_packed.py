"""attention_packed: the bits of a page that is widened first, for every number of queries and part of a page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tierd.kernels.cpu.attention_packed import (
    PACKED_QUERIES,
    add_packed_values,
    packed_scores,
    packed_scratch_bytes,
)
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.microkernel import tile_product
from tierd.kernels.cpu.pages import page_values, widen_keys, widen_values
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

PACKED = [name for name, form in PAGE_FORMATS.items() if form.packed]
COUNTS = range(1, PACKED_QUERIES + 1)


def page(format: str, head_dim: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """A job, and the keys and the values of one head, of any bytes that are no NaN."""
    layout = PageLayout(1, 1, head_dim, format)
    record = np.random.default_rng(head_dim).integers(0, 256, layout.layer_bytes, np.uint8)
    record = np.where(record & 0x7C == 0x7C, record & 0x83, record)
    job: Any = np.zeros((), JOB)[()]
    job["head_dim"] = head_dim
    for name, value in page_values(layout).items():
        job[name] = value
    return job, record[: layout.plane_bytes].copy(), record[layout.plane_bytes :].copy()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("queries", COUNTS)
def test_scores(format: str, head_dim: int, queries: int) -> None:
    job, keys, _ = page(format, head_dim)
    x = np.random.default_rng(1).standard_normal((queries, head_dim)).astype(np.float32)
    tile, scratch = np.empty((head_dim, 16), np.float32), np.empty(packed_scratch_bytes(head_dim), np.uint8)
    found, expected = (np.full((queries + 1, 32), np.nan, np.float32) for _ in range(2))
    packed_scores(
        job, keys.ctypes.data, x.ctypes.data, 4 * head_dim, queries, found.ctypes.data, 128, scratch.ctypes.data
    )
    widen_keys(job, keys.ctypes.data, tile.ctypes.data)
    tile_product(
        tile.ctypes.data, 64, x.ctypes.data, 4 * head_dim, expected.ctypes.data, 128, head_dim, queries, np.int64(0)
    )
    assert np.isfinite(expected[:queries, :16]).all()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("queries", COUNTS)
@pytest.mark.parametrize(("low", "high"), [(0, 16), (0, 1), (5, 12)])
def test_values(format: str, head_dim: int, queries: int, low: int, high: int) -> None:
    job, _, values = page(format, head_dim)
    rng = np.random.default_rng(1)
    weights = rng.random((queries, 32), np.float32)
    tile, scratch = np.empty((16, head_dim), np.float32), np.empty(packed_scratch_bytes(head_dim), np.uint8)
    found = rng.standard_normal((queries + 1, head_dim)).astype(np.float32)
    expected = found.copy()
    add_packed_values(
        job, values.ctypes.data, weights.ctypes.data, 128, queries, low, high, found.ctypes.data, scratch.ctypes.data
    )
    widen_values(job, values.ctypes.data, tile.ctypes.data)
    for d in range(0, head_dim, 16):
        tile_product(
            tile.ctypes.data + 4 * (low * head_dim + d), 4 * head_dim, weights.ctypes.data + 4 * low, 128,
            expected.ctypes.data + 4 * d, 4 * head_dim, high - low, queries, np.int64(1),
        )  # fmt: skip
    assert not np.array_equal(found[:queries], found[queries])
    assert np.array_equal(found, expected)
