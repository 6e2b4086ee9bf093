"""Pages from one format to another: what the store keeps of a page may be packed more than what is computed on.

A page is widened to float32 and written again as `kernels/cpu/pages.py` writes tokens: it is what it would be if the
numbers that it holds had been written in the other format (`reference.quant`). Between exact formats and packed ones
keys are turned, on the way back as well: the Hadamard matrix is its own inverse.
"""

from __future__ import annotations

import numpy as np
from numba import from_dtype, njit, types
from numpy.typing import NDArray

from tierd.kernels.cpu.codes import store8_fp8
from tierd.kernels.cpu.pages import FP32, PAGE_FIELDS, page_values, widen_keys, widen_values, write_token
from tierd.kernels.cpu.simd import add, load8, mul, scatter8, splat, store8, store8_bf16, store8_fp16, sub
from tierd.kernels.layout import PAGE_TOKENS, PageLayout

Bytes = NDArray[np.uint8]
_SHAPE = np.dtype([("kv_heads", np.int64), ("head_dim", np.int64), *PAGE_FIELDS])
_FP16, _BF16 = 1, 2  # as `pages` counts formats


class Repacker:
    """From the format of one layout to that of another of the same shape, whole records or some of their layers.

    Any thread, several at once; the interpreter's lock is not held. Raises ValueError for layouts of two shapes.
    """

    def __init__(self, source: PageLayout, target: PageLayout) -> None:
        if _shape(source) != _shape(target) or source.page_tokens != PAGE_TOKENS:
            raise ValueError(f"pages of {source.describe()} can't become pages of {target.describe()}")
        self.source, self.target = source, target
        self._shapes = np.zeros(2, _SHAPE)
        for place, layout in enumerate((source, target)):
            shape = {"kv_heads": layout.kv_heads, "head_dim": layout.head_dim}
            for name, value in (shape | page_values(layout)).items():
                self._shapes[place][name] = value

    def __call__(self, source: Bytes, target: Bytes, layers: int) -> None:
        """Writes the first `layers` layers in `source` to `target`: uint8[layers * layer_bytes] each, or longer."""
        if len(source) < layers * self.source.layer_bytes or len(target) < layers * self.target.layer_bytes:
            raise ValueError(f"{len(source)} and {len(target)} bytes are no {layers} layers")
        if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
            raise ValueError("records are contiguous, and the one to be written is writeable")
        room = np.empty(3 * PAGE_TOKENS * self.source.head_dim, np.float32)
        _repack(self._shapes[0], self._shapes[1], source.ctypes.data, target.ctypes.data, layers, room.ctypes.data)

    @staticmethod
    def compile() -> None:
        """Compiles the kernel, or loads it, ahead of use."""
        shape = from_dtype(_SHAPE)
        _repack.compile((shape, shape, *[types.int64] * 4))


class PageCodec:
    """Pages of memory as the store keeps them, and back: `tiers.repacked.Codec`. Any thread, several at once."""

    def __init__(self, memory: PageLayout, stored: PageLayout) -> None:
        self._pack, self._unpack = Repacker(memory, stored), Repacker(stored, memory)
        self.layers = memory.num_layers
        self.layer_bytes, self.record_bytes = memory.layer_bytes, memory.record_bytes
        self.stored_layer_bytes, self.stored_record_bytes = stored.layer_bytes, stored.record_bytes
        self._payload_bytes = stored.payload_bytes

    def encode(self, page: Bytes, stored: Bytes) -> None:
        """A page of memory as it is stored; what is behind its last layer is zeroed."""
        self._pack(page, stored, self.layers)
        stored[self._payload_bytes :] = 0

    def decode(self, stored: Bytes, page: Bytes, layers: int) -> None:
        """The first layers of what is stored, as memory holds them."""
        self._unpack(stored, page, layers)

    @staticmethod
    def compile() -> None:
        """Compiles the kernel, or loads it, ahead of use."""
        Repacker.compile()


def _shape(layout: PageLayout) -> tuple[int, int, int, int]:
    return layout.num_layers, layout.kv_heads, layout.head_dim, layout.page_tokens


@njit(nogil=True, cache=True)
def _turn_columns(x, head_dim, rotation):
    """Hadamard blocks of `rotation` channels on [head_dim][token], normalized: what `pages.turn` does to each token."""
    row = 4 * PAGE_TOKENS
    width = 1
    while width < rotation:
        for first in range(0, head_dim, 2 * width):
            for d in range(first, first + width):
                for half in range(0, row, 32):
                    at, other = x + d * row + half, x + (d + width) * row + half
                    low, high = load8(at), load8(other)
                    store8(at, add(low, high))
                    store8(other, sub(low, high))
        width *= 2
    scale = splat(np.float32(1) / np.sqrt(np.float32(rotation)))
    for at in range(x, x + head_dim * row, 32):
        store8(at, mul(load8(at), scale))


@njit(nogil=True, cache=True)
def _narrow(format, source, count, target):
    """Writes `count` (a multiple of 8) float32 as elements without scales."""
    if format == FP32:
        for i in range(0, count, 8):
            store8(target + 4 * i, load8(source + 4 * i))
    elif format == _FP16:
        for i in range(0, count, 8):
            store8_fp16(target + 2 * i, load8(source + 4 * i))
    elif format == _BF16:
        for i in range(0, count, 8):
            store8_bf16(target + 2 * i, load8(source + 4 * i))
    else:
        for i in range(0, count, 8):
            store8_fp8(target + i, load8(source + 4 * i))


@njit(nogil=True, cache=True)
def _repack(source, target, at, to, layers, room):
    """`room`: float32 [3][token * head_dim] of scratch."""
    head_dim, count = source.head_dim, PAGE_TOKENS * source.head_dim
    keys, values, rows = room, room + 4 * count, room + 8 * count
    packs = target.rotation > 1
    for layer in range(layers):
        for head in range(source.kv_heads):
            key_at = at + layer * source.layer_bytes + head * source.key_head_bytes
            value_at = at + layer * source.layer_bytes + source.plane_bytes + head * source.value_head_bytes
            key_to = to + layer * target.layer_bytes + head * target.key_head_bytes
            value_to = to + layer * target.layer_bytes + target.plane_bytes + head * target.value_head_bytes
            widen_keys(source, key_at, keys)
            widen_values(source, value_at, values)
            if source.rotation != target.rotation:
                _turn_columns(keys, head_dim, max(source.rotation, target.rotation))
            if not packs:
                _narrow(target.key_format, keys, count, key_to)
                _narrow(target.value_format, values, count, value_to)
                continue
            for d in range(head_dim):
                scatter8(rows + 4 * d, 4 * head_dim, load8(keys + 4 * d * PAGE_TOKENS))
                scatter8(rows + 4 * (d + 8 * head_dim), 4 * head_dim, load8(keys + 4 * d * PAGE_TOKENS + 32))
            for token in range(PAGE_TOKENS):
                row = 4 * token * head_dim
                write_token(target, rows + row, values + row, key_to, value_to, token)
