"""Packed pages in kernels: codes to numbers and back, as `kernels/layout.py` says; functions of the device only.

Memory is bytes here. `BITS` is 8 or 4 for codes with scales, `FP8` for e4m3. Of fp8 the bits are moved by hand, for
cards before compute capability 8.9 have no such type: the 7 low bits, as the high ones of an fp16, are the value / 256.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXACT, FP8 = tl.constexpr(0), tl.constexpr(1)  # beside 8 and 4
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a float32 and taken off again, it leaves the nearest integer


@triton.jit
def half_at(at, mask):
    """fp16 numbers at byte pointers, as fp32; 0 where masked."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def from_fp8(byte):
    """e4m3 bits (uint8) as fp32."""
    bits = byte.to(tl.int32)
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), moved.to(tl.float32) * 256.0)


@triton.jit
def to_fp8(x):
    """fp32 as e4m3 bits (uint8), held within +-448, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = ((size * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(size < 0.015625, tiny, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def load_keys(head, token, mask, d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Keys fp32 [D, N] of tokens [N] of pages; `head` [1, N] points at each page's keys of one head."""
    if BITS == 1:
        return from_fp8(tl.load(head + (d * 16)[:, None] + token[None, :], mask=mask, other=0))
    STEP: tl.constexpr = HEAD_DIM // GROUP * 32
    SCALES: tl.constexpr = 2 * HEAD_DIM * BITS
    of_group = (d // GROUP * 32)[:, None] + (token * 2)[None, :]
    scale = half_at(head + SCALES + of_group, mask)
    if BITS == 8:
        code = tl.load(head + (d * 16)[:, None] + token[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        x = code.to(tl.float32) * scale
        anchor = half_at(head + SCALES + STEP + (d * 2)[:, None], mask)
    else:
        byte = tl.load(head + (d * 8)[:, None] + (token % 8)[None, :], mask=mask, other=0).to(tl.int32)
        code = (byte >> (token // 8 * 4)[None, :]) & 15
        x = code.to(tl.float32) * scale + half_at(head + SCALES + STEP + of_group, mask)
        anchor = half_at(head + SCALES + 2 * STEP + (d * 2)[:, None], mask)
    return x + anchor


@triton.jit
def load_values(head, token, mask, d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Values fp32 [N, D] of tokens [N] of pages; `head` [N, 1] points at each page's values of one head."""
    if BITS == 1:
        return from_fp8(tl.load(head + (token * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0))
    STEP: tl.constexpr = HEAD_DIM // GROUP * 32
    SCALES: tl.constexpr = 2 * HEAD_DIM * BITS
    of_group = (token * 2)[:, None] + (d // GROUP * 32)[None, :]
    scale = half_at(head + SCALES + of_group, mask)
    if BITS == 8:
        code = tl.load(head + (token * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        return code.to(tl.float32) * scale
    at = (token * (HEAD_DIM // 2))[:, None] + (d // 16 * 8 + d % 8)[None, :]
    byte = tl.load(head + at, mask=mask, other=0).to(tl.int32)
    code = (byte >> (d // 8 % 2 * 4)[None, :]) & 15
    return code.to(tl.float32) * scale + half_at(head + SCALES + STEP + of_group, mask)


@triton.jit
def _codes_of(x, head, token, is_row, d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [16, BLOCK_D] of x fp32 [16, BLOCK_D]; stores scales and minima of the rows that are there."""
    BLOCK_D: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = BLOCK_D // GROUP
    SCALES: tl.constexpr = 2 * HEAD_DIM * BITS
    STEP: tl.constexpr = HEAD_DIM // GROUP * 32
    grouped = tl.reshape(x, (16, GROUPS, GROUP))
    ruined = tl.sum(grouped * 0.0, 2)  # NaN where a number of the group is none, else 0
    g = tl.arange(0, GROUPS)
    at = head + SCALES + (g * 32)[None, :] + (token * 2)[:, None]
    mask = is_row[:, None] & (g * GROUP < HEAD_DIM)[None, :]
    if BITS == 8:
        low = tl.zeros((16, GROUPS), tl.float32)
        scale = (tl.max(tl.abs(grouped), 2) / 127.0 + ruined).to(tl.float16)
    else:
        least, most = tl.min(grouped, 2), tl.max(grouped, 2)
        minimum = (least + ruined).to(tl.float16)
        tl.store((at + STEP).to(tl.pointer_type(tl.float16)), minimum, mask=mask)
        low = minimum.to(tl.float32)
        scale = ((most - least) / 15.0 + ruined).to(tl.float16)
    tl.store(at.to(tl.pointer_type(tl.float16)), scale, mask=mask)
    step = scale.to(tl.float32)
    inverse = tl.where(step == 0.0, 0.0, 1.0 / tl.where(step == 0.0, 1.0, step))
    count = (grouped - low[:, :, None]) * inverse[:, :, None]
    bound = 127.0 if BITS == 8 else 15.0
    floor = -127.0 if BITS == 8 else 0.0
    count = tl.where(count == count, tl.minimum(tl.maximum(count, floor), bound), 0.0)
    return tl.reshape(((count + _ROUNDER) - _ROUNDER).to(tl.int32), (16, BLOCK_D))


@triton.jit
def store_keys(k, head, token, is_row, d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Packs turned keys fp32 [16, BLOCK_D]; row t is token t of the page whose keys of one head lie at `head`."""
    in_dim = d < HEAD_DIM
    if BITS == 1:
        target = head + (d * 16)[None, :] + token[:, None]
        tl.store(target, to_fp8(k), mask=is_row[:, None] & in_dim[None, :])
    else:
        PARTS: tl.constexpr = 1 if BITS == 8 else 2
        anchor_at = head + 2 * HEAD_DIM * BITS + PARTS * (HEAD_DIM // GROUP * 32) + d * 2
        starts = (d * 0) + tl.max(tl.where((token == 0) & is_row, 1, 0), 0)
        own = tl.sum(tl.where((token == 0)[:, None], k, 0.0), 0).to(tl.float16)
        stored = half_at(anchor_at, in_dim & (starts == 0))
        anchor = tl.where(starts != 0, own.to(tl.float32), stored)
        tl.store(anchor_at.to(tl.pointer_type(tl.float16)), own, mask=in_dim & (starts != 0))
        x = tl.where(is_row[:, None] & in_dim[None, :], k - anchor[None, :], 0.0)
        codes = _codes_of(x, head, token, is_row, d, HEAD_DIM, GROUP, BITS)
        if BITS == 8:
            target = head + (d * 16)[None, :] + token[:, None]
            tl.store(target, codes.to(tl.uint8), mask=is_row[:, None] & in_dim[None, :])
        else:
            byte = tl.arange(0, 8)
            target = head + (d * 8)[:, None] + byte[None, :]
            there = tl.load(target, mask=in_dim[:, None], other=0).to(tl.int32)
            by_half = tl.permute(tl.reshape(tl.trans(codes), (codes.shape[1], 2, 8)), (0, 2, 1))
            low, high = tl.split(by_half)
            rows = tl.permute(tl.reshape(is_row.to(tl.int32), (2, 8)), (1, 0))
            low_row, high_row = tl.split(rows)
            low = tl.where(low_row[None, :] != 0, low, there & 15)
            high = tl.where(high_row[None, :] != 0, high, there >> 4)
            tl.store(target, (low | (high << 4)).to(tl.uint8), mask=in_dim[:, None])


@triton.jit
def store_values(v, head, token, is_row, d, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Packs values fp32 [16, BLOCK_D], as `store_keys`."""
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    target = head + (token * HEAD_DIM)[:, None] + d[None, :]
    if BITS == 1:
        tl.store(target, to_fp8(v), mask=mask)
    else:
        codes = _codes_of(tl.where(mask, v, 0.0), head, token, is_row, d, HEAD_DIM, GROUP, BITS)
        if BITS == 8:
            tl.store(target, codes.to(tl.uint8), mask=mask)
        else:
            CHUNKS: tl.constexpr = codes.shape[1] // 16
            by_half = tl.permute(tl.reshape(codes, (16, CHUNKS, 2, 8)), (0, 1, 3, 2))
            low, high = tl.split(by_half)
            packed = tl.reshape(low | (high << 4), (16, CHUNKS * 8)).to(tl.uint8)
            at = tl.arange(0, CHUNKS * 8)
            half = head + (token * (HEAD_DIM // 2))[:, None] + at[None, :]
            tl.store(half, packed, mask=is_row[:, None] & (at < HEAD_DIM // 2)[None, :])
