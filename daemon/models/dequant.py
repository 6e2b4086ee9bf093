"""Numpy readers of the quantized blocks of GGUF files.

`dequantize` gives fp32 values that equal ggml's own; the `split_*` functions give the parts of a block unchanged, for
weight formats that keep them (nothing is rounded). Block layouts are those of ggml's `block_*` structures:
fp16 scale `d`, fp16 minimum `m`, nibbles with the first half of a block in the low ones, fifth bits in a 32-bit mask.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.kernels.packing import KQuants, WeightFormat

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]

# Of powers of two in fp16.
_FP16_LOWEST, _FP16_HIGHEST = -24, 15
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # the numbers of MXFP4, doubled
GROUP = 32  # columns that share a scale in the 32-element block types
_LOW_NIBBLE = np.uint8(0x0F)


def dequantize(kind: GgmlType, raw: U8) -> F32:  # raw [rows, row_bytes] -> [rows, cols]
    """The values of rows of blocks, as fp32."""
    rows = raw.shape[0]
    match kind:
        case GgmlType.F32:
            values = np.ascontiguousarray(raw).view("<f4").astype(np.float32, copy=False)
        case GgmlType.F16:
            values = np.ascontiguousarray(raw).view("<f2").astype(np.float32)
        case GgmlType.BF16:
            values = (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case GgmlType.MXFP4:
            doubled, exponents = _mxfp4(raw)
            with np.errstate(over="ignore"):  # the caller checks that weights are finite
                values = np.ldexp(_grouped(doubled), exponents[:, :, None] - 128)
        case GgmlType.Q8_0 | GgmlType.Q5_0 | GgmlType.Q4_0:
            quants, scale = split_int8(kind, raw)
            values = _grouped(quants) * scale.astype(np.float32)[:, :, None]
        case GgmlType.Q4_1 | GgmlType.Q5_1:
            values = _affine(*split_affine(kind, raw))
        case GgmlType.Q4_K:
            values = _q4_k(_blocks(raw, 144))
        case GgmlType.Q5_K:
            values = _q5_k(_blocks(raw, 176))
        case GgmlType.Q6_K:
            values = _q6_k(_blocks(raw, 210))
        case _:
            assert_never(kind)
    return values.reshape(rows, -1)


def split_int8(kind: GgmlType, raw: U8) -> tuple[npt.NDArray[np.int8], F16]:  # -> q [rows, cols], scale [rows, cols/32]
    """Q8_0, Q5_0, Q4_0 or MXFP4 rows as signed bytes and scales: value = q * scale, exactly. ValueError otherwise.

    Numbers of MXFP4 are halves of whole ones up to 12, times a power of two. Raises ModelFileError for one that no fp16
    number holds.
    """
    rows = raw.shape[0]
    match kind:
        case GgmlType.MXFP4:
            doubled, exponents = _mxfp4(raw)
            used = doubled.reshape(rows, -1, GROUP).any(axis=2)
            exact = np.where(used, exponents, 128) - 128
            if exact.size and not _FP16_LOWEST <= exact.min() <= exact.max() <= _FP16_HIGHEST:
                raise ModelFileError(
                    "weights of type MXFP4 with a scale that int8-g32 can't hold; pull it with --weights bf16"
                )
            return doubled, np.where(used, np.ldexp(np.float32(1), exact), 0).astype(np.float16)
        case GgmlType.Q8_0:
            blocks = _blocks(raw, 34)
            quants = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        case GgmlType.Q5_0:
            blocks = _blocks(raw, 22)
            quants = _five_bits(blocks[:, :, 2:6], blocks[:, :, 6:]).view(np.int8) - np.int8(16)
        case GgmlType.Q4_0:
            blocks = _blocks(raw, 18)
            quants = _nibbles(blocks[:, :, 2:]).view(np.int8) - np.int8(8)
        case _:
            raise ValueError(f"{kind.name} doesn't split into int8 groups of {GROUP}")
    return quants.reshape(rows, -1), _half(blocks, 0)


def split_affine(kind: GgmlType, raw: U8) -> tuple[U8, F16, F16]:  # -> q [rows, cols], scale, minimum [rows, cols / 32]
    """Q4_1, Q4_0, Q5_1 or Q5_0 rows as integers, scales and minima: value = q * scale + minimum. ValueError otherwise.

    For Q4_0 and Q5_0 the minimum is -8 or -16 times the scale: a multiplication by a power of two, exact unless the
    scale is beyond 4094 (no model has such weights; the caller checks that the minima are finite).
    """
    rows = raw.shape[0]
    match kind:
        case GgmlType.Q4_1:
            blocks = _blocks(raw, 20)
            quants, minimum = _nibbles(blocks[:, :, 4:]), _half(blocks, 2)
        case GgmlType.Q5_1:
            blocks = _blocks(raw, 24)
            quants, minimum = _five_bits(blocks[:, :, 4:8], blocks[:, :, 8:]), _half(blocks, 2)
        case GgmlType.Q4_0:
            blocks = _blocks(raw, 18)
            quants, minimum = _nibbles(blocks[:, :, 2:]), _times(_half(blocks, 0), -8)
        case GgmlType.Q5_0:
            blocks = _blocks(raw, 22)
            quants, minimum = _five_bits(blocks[:, :, 2:6], blocks[:, :, 6:]), _times(_half(blocks, 0), -16)
        case _:
            raise ValueError(f"{kind.name} doesn't split into scales and minima for {GROUP} columns")
    return quants.reshape(rows, -1), _half(blocks, 0), minimum


def _mxfp4(raw: U8) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:  # -> [rows, cols], [rows, cols / 32]
    """Twice the numbers of blocks of MXFP4, and the exponents of two of their scales, 127 too large."""
    blocks = _blocks(raw, 17)
    return _E2M1[_nibbles(blocks[:, :, 1:])].reshape(raw.shape[0], -1), blocks[:, :, 0].astype(np.int32)


def _times(scale: F16, factor: int) -> F16:
    with np.errstate(over="ignore", invalid="ignore"):
        return scale * np.float16(factor)


def split_k(kind: GgmlType, raw: U8, format: WeightFormat) -> KQuants:
    """Q4_K, Q5_K or Q6_K rows as integers, and scales and minima as the file has them: steps and how many of each.

    `format` is one of the K formats that holds the kind: int8-k takes signed bytes and sixteen scales a block, which
    repeats the eight of Q4_K and Q5_K. Raises ValueError for another kind.
    """
    rows = raw.shape[0]
    match kind:
        case GgmlType.Q4_K:
            blocks = _blocks(raw, 144)
            quants, step, base = _paired_nibbles(blocks[:, :, 16:144]), _half(blocks, 0), _half(blocks, 2)
            scales, minima = _six_bit_scales(blocks[:, :, 4:16])
        case GgmlType.Q5_K:
            blocks = _blocks(raw, 176)
            quants, step, base = _q5_k_quants(blocks), _half(blocks, 0), _half(blocks, 2)
            scales, minima = _six_bit_scales(blocks[:, :, 4:16])
        case GgmlType.Q6_K:
            blocks = _blocks(raw, 210)
            quants, step = _q6_k_quants(blocks).view(np.uint8), _half(blocks, 208)
            base = np.zeros_like(step)
            scales = np.ascontiguousarray(blocks[:, :, 192:208])
            minima = np.zeros_like(scales)
        case _:
            raise ValueError(f"{kind.name} isn't a K-quant that splits")
    quants, scales, minima = (part.reshape(rows, -1) for part in (quants, scales, minima))
    if format is WeightFormat.INT8_K and kind is not GgmlType.Q6_K:
        scales, minima = np.repeat(scales, 2, axis=1), np.repeat(minima, 2, axis=1)
    q = quants.view(np.int8) if format is WeightFormat.INT8_K else quants
    return KQuants(q, step, scales.view(np.int8), -base, minima)


def _blocks(raw: U8, block_bytes: int) -> U8:  # [rows, blocks, block_bytes]
    return raw.reshape(raw.shape[0], -1, block_bytes)


def _half(blocks: U8, at: int) -> F16:  # [rows, blocks]
    """The fp16 number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _nibbles(packed: U8) -> U8:  # [..., 16] -> [..., 32]
    """Low nibbles first, then high ones."""
    return np.concatenate([packed & _LOW_NIBBLE, packed >> np.uint8(4)], axis=-1)


def _five_bits(mask: U8, packed: U8) -> U8:  # [..., 4], [..., 16] -> [..., 32]
    """Nibbles with their fifth bit, which is bit i of the mask for element i."""
    fifth = np.unpackbits(np.ascontiguousarray(mask), axis=-1, bitorder="little")
    return _nibbles(packed) | (fifth << np.uint8(4))


def _grouped(quants: npt.NDArray[np.int8] | U8) -> F32:  # [rows, cols] -> [rows, groups, 32]
    return quants.reshape(quants.shape[0], -1, GROUP).astype(np.float32)


def _affine(quants: U8, scale: F16, minimum: F16) -> F32:
    values: F32 = _grouped(quants) * scale.astype(np.float32)[:, :, None]
    values += minimum.astype(np.float32)[:, :, None]
    return values


def _six_bit_scales(packed: U8) -> tuple[U8, U8]:  # [rows, blocks, 12] -> scales, minima [rows, blocks, 8]
    """Sub-block scales and minima of Q4_K and Q5_K: six bits each, the upper two of the last four stored apart."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    six, two = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([low & six, (high & _LOW_NIBBLE) | ((low >> np.uint8(2)) & two)], axis=-1)
    minima = np.concatenate([mid & six, (high >> np.uint8(4)) | ((mid >> np.uint8(2)) & two)], axis=-1)
    return scales, minima


def _k_affine(blocks: U8, quants: U8) -> F32:  # quants [rows, blocks, 8, 32]
    """value = d * scale * q - dmin * minimum, per sub-block of 32."""
    scales, minima = _six_bit_scales(blocks[:, :, 4:16])
    step = _half(blocks, 0).astype(np.float32)[:, :, None] * scales.astype(np.float32)
    base = _half(blocks, 2).astype(np.float32)[:, :, None] * minima.astype(np.float32)
    values: F32 = quants.astype(np.float32) * step[..., None]
    values -= base[..., None]
    return values


def _paired_nibbles(packed: U8) -> U8:  # [rows, blocks, 128] -> [rows, blocks, 8, 32]
    """Each 32 bytes hold two sub-blocks: low nibbles, then high nibbles."""
    runs = packed.reshape(*packed.shape[:2], 4, 32)
    return np.stack([runs & _LOW_NIBBLE, runs >> np.uint8(4)], axis=3).reshape(*packed.shape[:2], 8, 32)


def _q4_k(blocks: U8) -> F32:
    return _k_affine(blocks, _paired_nibbles(blocks[:, :, 16:144]))


def _q5_k_quants(blocks: U8) -> U8:  # [rows, blocks, 8, 32]
    """Bit s of byte i of the mask is the fifth bit of element i of sub-block s."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> shifts) & np.uint8(1)
    return _paired_nibbles(blocks[:, :, 48:176]) | (fifth << np.uint8(4))


def _q5_k(blocks: U8) -> F32:
    return _k_affine(blocks, _q5_k_quants(blocks))


def _q6_k_quants(blocks: U8) -> npt.NDArray[np.int8]:  # [rows, blocks, 256]
    """Two halves of 128: 64 bytes of low nibbles and 32 bytes of two upper bits each."""
    shape = blocks.shape[:2]
    low = blocks[:, :, 0:128].reshape(*shape, 2, 1, 64) >> np.array([[0], [4]], np.uint8)
    high = blocks[:, :, 128:192].reshape(*shape, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    low = (low & _LOW_NIBBLE).reshape(*shape, 256)
    high = (high & np.uint8(3)).reshape(*shape, 256)
    return (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)


def _q6_k(blocks: U8) -> F32:
    """Scales are int8, for 16 elements each."""
    shape = blocks.shape[:2]
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    step = _half(blocks, 208).astype(np.float32)[:, :, None] * scales
    values: F32 = _q6_k_quants(blocks).reshape(*shape, 16, 16).astype(np.float32) * step[..., None]
    return values
