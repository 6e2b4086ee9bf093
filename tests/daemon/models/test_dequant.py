"""Against the `gguf` package: the same blocks give the same numbers, and the splits lose nothing."""

import gguf
import numpy as np
import pytest

from tierd.daemon.models.dequant import dequantize, split_affine, split_int8, split_k
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import BLOCKS, GgmlType, row_bytes
from tierd.kernels.packing import WeightFormat

ROWS, COLS = 7, 512


def random_blocks(kind: GgmlType) -> np.ndarray:  # [ROWS, row_bytes]
    """Random bytes, with scales that are finite: a random fp16 may be a NaN, which equals nothing."""
    rng = np.random.default_rng(int(kind))
    _, block, size = BLOCKS[kind]
    raw = rng.integers(0, 256, (ROWS, COLS // block, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for at in halves.get(kind.name, [208] if kind is GgmlType.Q6_K else []):
        values = rng.standard_normal(raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = values[..., None].view(np.uint8)
    if kind is GgmlType.MXFP4:
        raw[:, :, 0] = rng.integers(104, 141, raw.shape[:2])  # powers of two that fp16 holds
    raw = raw.reshape(ROWS, -1)
    if kind in (GgmlType.F32, GgmlType.F16, GgmlType.BF16):
        values32 = rng.standard_normal((ROWS, COLS)).astype(np.float32)
        raw = gguf.quants.quantize(values32, gguf.GGMLQuantizationType(int(kind))).view(np.uint8)
    assert raw.shape[1] == row_bytes(kind, COLS)
    return raw


@pytest.mark.parametrize("kind", list(GgmlType))
def test_equals_gguf_bit_for_bit(kind):
    raw = random_blocks(kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    got = dequantize(kind, raw)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q5_0, GgmlType.Q4_0, GgmlType.MXFP4])
def test_int8_split_is_lossless(kind):
    raw = random_blocks(kind)
    quants, scale = split_int8(kind, raw)
    assert quants.dtype == np.int8 and scale.dtype == np.float16
    values = quants.reshape(ROWS, -1, 32).astype(np.float32) * scale.astype(np.float32)[:, :, None]
    np.testing.assert_array_equal(values.reshape(ROWS, -1), dequantize(kind, raw))


def test_a_power_of_two_that_fp16_does_not_hold_is_refused_where_it_counts():
    raw = np.zeros((1, 2 * 17), np.uint8)
    raw[0, ::17] = 103, 0  # 2 ** -25, 2 ** -128
    quants, scale = split_int8(GgmlType.MXFP4, raw)
    assert not quants.any() and not scale.any()
    for exponent, value in ((104, 2.0**-24), (143, 2.0**15)):
        raw[0, 0], raw[0, 1] = exponent, 0xF0 | 1
        quants, scale = split_int8(GgmlType.MXFP4, raw)
        assert (quants[0, 0], quants[0, 16], scale[0, 0]) == (1, -12, value)
    for exponent in (103, 144, 255):
        raw[0, 0] = exponent
        with pytest.raises(ModelFileError, match="scale that int8-g32 can't hold; pull it with --weights bf16"):
            split_int8(GgmlType.MXFP4, raw)


@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.Q4_0, GgmlType.Q5_1, GgmlType.Q5_0])
def test_affine_split_is_lossless(kind):
    raw = random_blocks(kind)
    quants, scale, minimum = split_affine(kind, raw)
    assert quants.dtype == np.uint8 and quants.max() <= (15 if kind in (GgmlType.Q4_0, GgmlType.Q4_1) else 31)
    groups = quants.reshape(ROWS, -1, 32).astype(np.float32)
    values = groups * scale.astype(np.float32)[:, :, None] + minimum.astype(np.float32)[:, :, None]
    np.testing.assert_array_equal(values.reshape(ROWS, -1), dequantize(kind, raw))


@pytest.mark.parametrize("format", [WeightFormat.INT4_K, WeightFormat.INT5_K, WeightFormat.INT8_K])
@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K])
def test_k_split_is_lossless(kind, format):
    if (kind, format) in (
        (GgmlType.Q5_K, WeightFormat.INT4_K), (GgmlType.Q6_K, WeightFormat.INT4_K), (GgmlType.Q6_K, WeightFormat.INT5_K)
    ):  # fmt: skip
        return
    raw = random_blocks(kind)
    k = split_k(kind, raw, format)
    assert k.q.dtype == (np.int8 if format is WeightFormat.INT8_K else np.uint8)
    scale, minimum = (
        counts.reshape(ROWS, COLS // 256, -1).astype(np.float32) * steps.astype(np.float32)[:, :, None]
        for steps, counts in ((k.scale_steps, k.scales), (k.minimum_steps, k.minimums))
    )
    q = k.q.astype(np.float32).reshape(*scale.shape, -1)
    np.testing.assert_array_equal((q * scale[..., None] + minimum[..., None]).reshape(ROWS, -1), dequantize(kind, raw))


def test_splits_refuse_other_types():
    with pytest.raises(ValueError, match="Q6_K doesn't split"):
        split_int8(GgmlType.Q6_K, random_blocks(GgmlType.Q6_K))
    with pytest.raises(ValueError, match="Q8_0 isn't a K-quant"):
        split_k(GgmlType.Q8_0, random_blocks(GgmlType.Q8_0), WeightFormat.INT8_K)
    with pytest.raises(ValueError, match="Q8_0 doesn't split"):
        split_affine(GgmlType.Q8_0, random_blocks(GgmlType.Q8_0))
