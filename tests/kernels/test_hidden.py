"""The final hidden states of a pass, against its logits and against the norm written down."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.kernels.cpu.hidden import final_hidden, queries


@pytest.mark.parametrize(("hidden", "floats"), [(16, 16), (20, 48)])
def test_rows_are_normed_and_in_the_order_asked_for(hidden: int, floats: int) -> None:
    draw = np.random.default_rng(hidden)
    stream = draw.standard_normal((5, floats)).astype(np.float32)
    norm = np.zeros(floats, np.float32)
    norm[:hidden] = draw.standard_normal(hidden)
    rows = np.array([3, 0, 3], np.int32)
    found = final_hidden(stream.ctypes.data, stream.strides[0], norm, hidden, 1e-5, rows)
    x = stream[rows, :hidden].astype(np.float64)
    expected = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * norm[:hidden]
    assert found.dtype == np.float32 and found.shape == (3, hidden)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    stream[:] = 0
    np.testing.assert_allclose(found, expected, atol=1e-5)  # a copy


def test_no_rows() -> None:
    stream = np.zeros((1, 16), np.float32)
    found = final_hidden(stream.ctypes.data, 64, np.ones(16, np.float32), 16, 1e-5, np.zeros(0, np.int32))
    assert found.shape == (0, 16)


def test_queries_are_the_first_heads_of_each_row_where_they_lie() -> None:
    qkv = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    job = {"rows": 3, "heads": 4, "head_dim": 8, "qkv": qkv.ctypes.data, "qkv_stride": qkv.strides[0]}
    found = queries(job)
    np.testing.assert_array_equal(found, qkv[:3, :32].reshape(3, 4, 8))
    qkv[0] = 0
    assert not found[0].any(), "a view"
