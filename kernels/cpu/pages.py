"""Keys and values of one head in one page: writing a token, and widening the page to float32.

What lies where, and what codes stand for, is said in `kernels/layout.py`. A token is packed once, from its own numbers
and its page's first token; what a page gives back depends on its bytes alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

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
    store_fp16,
)
from tierd.kernels.cpu.simd import (
    add,
    fma,
    load8,
    load8_bf16,
    load8_fp16,
    load_f32,
    load_fp16,
    max8,
    mul,
    scatter8,
    scatter8_bf16,
    scatter8_fp16,
    splat,
    store8,
    store8_bf16,
    store8_fp16,
    sub,
)
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

FP32, _FP16, _BF16, _FP8, INT8, INT4 = range(6)
_EXACT = {"fp32": FP32, "fp16": _FP16, "bf16": _BF16, "fp8": _FP8}
_PAGE_TOKENS = 16

# What a job says about its pages. Formats are those numbers, offsets are bytes from where a head begins.
PAGE_FIELDS = tuple(
    (name, np.int64)
    for name in (
        "key_format", "value_format", "layer_bytes", "plane_bytes", "key_head_bytes", "value_head_bytes",
        "rotation", "group", "key_scales", "key_minima", "key_anchor", "value_scales", "value_minima",
    )
)  # fmt: skip


def page_values(layout: PageLayout) -> dict[str, int]:
    """The `PAGE_FIELDS` of a layout."""
    form, keys, values = PAGE_FORMATS[layout.format], layout.keys, layout.values
    codes = {8: INT8, 4: INT4}
    return {
        "key_format": codes[form.key_bits] if form.packed else _EXACT[layout.format],
        "value_format": codes[form.value_bits] if form.packed else _EXACT[layout.format],
        "layer_bytes": layout.layer_bytes,
        "plane_bytes": layout.plane_bytes,
        "key_head_bytes": keys.stop,
        "value_head_bytes": values.stop,
        "rotation": layout.rotation,
        "group": layout.group,
        "key_scales": keys.scales,
        "key_minima": keys.minima,
        "key_anchor": keys.anchor,
        "value_scales": values.scales,
        "value_minima": values.minima,
    }


@njit(nogil=True, cache=True)
def turn(x, head_dim, rotation):
    """Hadamard blocks of `rotation` channels (16 or more, a power of two) on one head in place, normalized."""
    row_bytes, block = 4 * head_dim, 4 * rotation
    scale = splat(np.float32(1) / np.sqrt(np.float32(rotation)))
    for d in range(0, row_bytes, 32):
        store8(x + d, hadamard8(load8(x + d)))
    width = 32
    while width < block:
        for first in range(0, row_bytes, 2 * width):
            for at in range(x + first, x + first + width, 32):
                low, high = load8(at), load8(at + width)
                store8(at, add(low, high))
                store8(at + width, sub(low, high))
        width *= 2
    for d in range(0, row_bytes, 32):
        store8(x + d, mul(load8(x + d), scale))


@njit(nogil=True, cache=True)
def _scale8(x, count, at):
    """The scale of a group of int8, stored at `at`; what its numbers are multiplied by."""
    largest = splat(np.float32(0))
    for d in range(0, 4 * count, 32):
        largest = larger8(load8(x + d), largest)
    store_fp16(at, largest8(largest) / np.float32(127))
    step = load_fp16(at)
    return np.float32(1) / step if step > 0 else np.float32(0)


@njit(nogil=True, cache=True)
def _scale4(x, count, at, minimum):
    """The scale and minimum of a group of 4 bits, stored; the minimum, and what is multiplied by."""
    low, high, largest = np.float32(np.inf), np.float32(-np.inf), splat(np.float32(0))
    for d in range(0, 4 * count, 32):
        v = load8(x + d)
        largest = larger8(v, largest)
        low, high = min(low, min8(v)), max(high, max8(v))
    if not largest8(largest) < np.inf:
        low, high = np.float32(np.nan), np.float32(np.nan)
    store_fp16(at, (high - low) / np.float32(15))
    store_fp16(minimum, low)
    step = load_fp16(at)
    return load_fp16(minimum), np.float32(1) / step if step > 0 else np.float32(0)


@njit(nogil=True, cache=True)
def _pack_key(job, x, at, token):
    """A turned key becomes a column of its page; x is changed."""
    head_dim, group = job.head_dim, job.group
    anchor = at + job.key_anchor
    if token == 0:
        for d in range(0, head_dim, 8):
            store8_fp16(anchor + 2 * d, load8(x + 4 * d))
    for d in range(0, head_dim, 8):
        store8(x + 4 * d, sub(load8(x + 4 * d), load8_fp16(anchor + 2 * d)))
    for first in range(0, head_dim, group):
        slot = 2 * (first // group * _PAGE_TOKENS + token)
        if job.key_format == INT8:
            inverse = splat(_scale8(x + 4 * first, group, at + job.key_scales + slot))
            for d in range(first, first + group, 8):
                scatter8_int8(at + d * _PAGE_TOKENS + token, _PAGE_TOKENS, mul(load8(x + 4 * d), inverse))
        else:
            low, factor = _scale4(x + 4 * first, group, at + job.key_scales + slot, at + job.key_minima + slot)
            for d in range(first, first + group, 8):
                codes = mul(sub(load8(x + 4 * d), splat(low)), splat(factor))
                scatter8_int4(at + d * 8 + token % 8, np.int64(8), np.int64(4 * (token // 8)), codes)


@njit(nogil=True, cache=True)
def _pack_value(job, x, at, token):
    """A value becomes a row of its page."""
    head_dim, group = job.head_dim, job.group
    for first in range(0, head_dim, group):
        slot = 2 * (first // group * _PAGE_TOKENS + token)
        if job.value_format == INT8:
            inverse = splat(_scale8(x + 4 * first, group, at + job.value_scales + slot))
            for d in range(first, first + group, 8):
                store8_int8(at + token * head_dim + d, mul(load8(x + 4 * d), inverse))
        else:
            low, factor = _scale4(x + 4 * first, group, at + job.value_scales + slot, at + job.value_minima + slot)
            for d in range(first, first + group, 16):
                codes = mul(sub(load8(x + 4 * d), splat(low)), splat(factor))
                others = mul(sub(load8(x + 4 * d + 32), splat(low)), splat(factor))
                store16_int4(at + (token * head_dim + d) // 2, codes, others)


@njit(nogil=True, cache=True)
def exact_at(job, layer_index, kv_head, record):
    """Where one head's keys and values lie in the exact copy of a page: a record of fp16, its keys turned as queries
    are."""
    head_bytes = 2 * _PAGE_TOKENS * job.head_dim
    keys = record + (2 * layer_index * job.kv_heads + kv_head) * head_bytes
    return keys, keys + job.kv_heads * head_bytes


@njit(nogil=True, cache=True)
def write_exact(job, key, value, keys, values, token):
    """Writes one head's key and value into the exact copy of their page. The key is a turned one, not packed yet."""
    for d in range(0, job.head_dim, 8):
        scatter8_fp16(keys + 2 * (d * _PAGE_TOKENS + token), 2 * _PAGE_TOKENS, load8(key + 4 * d))
        store8_fp16(values + 2 * (token * job.head_dim + d), load8(value + 4 * d))


@njit(nogil=True, cache=True)
def widen_exact(job, at, target):
    """One head's keys, or values, of an exact copy as float32."""
    _widen(_FP16, at, _PAGE_TOKENS * job.head_dim, target)


@njit(nogil=True, cache=True)
def write_token(job, key, value, keys, values, token):
    """Writes one head's key (a column of the page) and value (a row). A packed page's first token comes first; its
    key is changed."""
    head_dim = job.head_dim
    if job.rotation > 1:
        _pack_key(job, key, keys, token)
        _pack_value(job, value, values, token)
    elif job.key_format == FP32:
        for d in range(0, head_dim, 8):
            scatter8(keys + 4 * (d * _PAGE_TOKENS + token), 4 * _PAGE_TOKENS, load8(key + 4 * d))
            store8(values + 4 * (token * head_dim + d), load8(value + 4 * d))
    elif job.key_format == _FP16:
        write_exact(job, key, value, keys, values, token)
    elif job.key_format == _BF16:
        for d in range(0, head_dim, 8):
            scatter8_bf16(keys + 2 * (d * _PAGE_TOKENS + token), 2 * _PAGE_TOKENS, load8(key + 4 * d))
            store8_bf16(values + 2 * (token * head_dim + d), load8(value + 4 * d))
    else:
        for d in range(0, head_dim, 8):
            scatter8_fp8(keys + d * _PAGE_TOKENS + token, _PAGE_TOKENS, load8(key + 4 * d))
            store8_fp8(values + token * head_dim + d, load8(value + 4 * d))


@njit(nogil=True, cache=True)
def _widen(format, source, count, target):
    """Copies `count` (a multiple of 8) elements without scales to `target`, as float32."""
    if format == FP32:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8(source + 4 * i))
    elif format == _FP16:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8_fp16(source + 2 * i))
    elif format == _BF16:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8_bf16(source + 2 * i))
    else:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8_fp8(source + i))


@njit(nogil=True, cache=True)
def widen_keys(job, at, target):
    """A head's keys as float32 [head_dim][token], turned as they are stored."""
    head_dim, group = job.head_dim, job.group
    if job.key_format < INT8:
        _widen(job.key_format, at, _PAGE_TOKENS * head_dim, target)
        return
    # Widened anchors lie in the last rows of the target for the time being: row d overwrites those of channels up to d.
    anchors = target + 4 * (_PAGE_TOKENS - 1) * head_dim
    for d in range(0, head_dim, 8):
        store8(anchors + 4 * d, load8_fp16(at + job.key_anchor + 2 * d))
    for first in range(0, head_dim, group):
        scales = at + job.key_scales + 2 * _PAGE_TOKENS * (first // group)
        s0, s1 = load8_fp16(scales), load8_fp16(scales + 16)
        if job.key_format == INT8:
            for d in range(first, first + group):
                anchor = splat(load_f32(anchors + 4 * d))
                codes, out = at + d * _PAGE_TOKENS, target + 4 * d * _PAGE_TOKENS
                store8(out, fma(load8_int8(codes), s0, anchor))
                store8(out + 32, fma(load8_int8(codes + 8), s1, anchor))
        else:
            minima = at + job.key_minima + 2 * _PAGE_TOKENS * (first // group)
            m0, m1 = load8_fp16(minima), load8_fp16(minima + 16)
            for d in range(first, first + group):
                anchor = splat(load_f32(anchors + 4 * d))
                codes, out = at + d * 8, target + 4 * d * _PAGE_TOKENS
                store8(out, add(fma(load8_low4(codes), s0, m0), anchor))
                store8(out + 32, add(fma(load8_high4(codes), s1, m1), anchor))


@njit(nogil=True, cache=True)
def widen_values(job, at, target):
    """A head's values as float32 [token][head_dim]."""
    head_dim, group = job.head_dim, job.group
    if job.value_format < INT8:
        _widen(job.value_format, at, _PAGE_TOKENS * head_dim, target)
        return
    for token in range(_PAGE_TOKENS):
        for first in range(0, head_dim, group):
            slot = 2 * (first // group * _PAGE_TOKENS + token)
            s = splat(load_fp16(at + job.value_scales + slot))
            if job.value_format == INT8:
                for i in range(token * head_dim + first, token * head_dim + first + group, 8):
                    store8(target + 4 * i, mul(load8_int8(at + i), s))
            else:
                m = splat(load_fp16(at + job.value_minima + slot))
                for i in range(token * head_dim + first, token * head_dim + first + group, 16):
                    codes = at + i // 2
                    store8(target + 4 * i, fma(load8_low4(codes), s, m))
                    store8(target + 4 * i + 32, fma(load8_high4(codes), s, m))
