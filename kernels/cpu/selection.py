"""Which pages a query needs, on the CPU: bounds of the keys of each page, and what each page may be worth.

The bounds of a page are the least and the largest value of each channel among its keys, as they are stored. No key of
the page scores more than `sum over channels of max(q * low, q * high)`. A head's pages share one softmax of these
bounds; a page is worth the mean of its shares over all heads.

Source of the bounds: Quest (Tang et al. 2024, arXiv 2406.10774). See `kernels/gpu/selection.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import from_dtype, njit, types
from numpy.typing import NDArray

from tierd.kernels.cpu.codes import min8
from tierd.kernels.cpu.pages import FP32, PAGE_FIELDS, page_values, widen_keys
from tierd.kernels.cpu.simd import add, fma, load8, load_f32, load_i64, max8, splat, store_f32, sum8
from tierd.kernels.layout import PAGE_TOKENS, PageLayout

Floats = NDArray[np.float32]
_SHAPE = np.dtype([("heads", np.int64), ("kv_heads", np.int64), ("head_dim", np.int64), *PAGE_FIELDS])
_ROOM_PAGES = 64  # more of them at a time


class PageBounds:
    """The bounds of the whole pages of one sequence, in all layers. 8 bytes a channel and kv head, layer and page.

    Args:
        layout: of its pages.
        heads: query heads.
    """

    def __init__(self, layout: PageLayout, heads: int) -> None:
        self._layout = layout
        self._shape = np.zeros(1, _SHAPE)
        shape = {"heads": heads, "kv_heads": layout.kv_heads, "head_dim": layout.head_dim}
        for name, value in (shape | page_values(layout)).items():
            self._shape[0][name] = value
        # Low and high of each head of each page: the order in which the score reads them.
        self.bounds: Floats = np.empty((layout.num_layers, 0, layout.kv_heads, 2, layout.head_dim), np.float32)
        self._scratch = np.empty(layout.head_dim * PAGE_TOKENS, np.float32)

    def learn(self, layer: int, first: int, addresses: NDArray[np.int64]) -> None:
        """Takes the bounds of pages `first` and up, all of whose tokens are there; `addresses` of their records."""
        stop = first + len(addresses)
        if stop > self.bounds.shape[1]:
            self._grow(stop)
        target = self.bounds[layer, first:stop]
        _learn(
            self._shape[0], addresses.ctypes.data, layer * self._layout.layer_bytes, len(addresses),
            target.ctypes.data, self._scratch.ctypes.data,
        )  # fmt: skip

    def worth(self, layer: int, query: Floats, first: int, stop: int) -> Floats:
        """What pages `first` to `stop` may be worth to a query [heads, head_dim], scaled as it is attended with."""
        pages = stop - first
        found, scratch = np.empty(pages, np.float32), np.empty(2 * query.size + pages, np.float32)
        query, bounds = np.ascontiguousarray(query), self.bounds[layer, first:stop]
        _weigh(
            self._shape[0], bounds.ctypes.data, query.ctypes.data, pages, found.ctypes.data, scratch.ctypes.data
        )  # fmt: skip
        return found

    def _grow(self, pages: int) -> None:
        layers, held, *rest = self.bounds.shape
        grown = np.empty((layers, max(pages, held + max(held // 2, _ROOM_PAGES)), *rest), np.float32)
        grown[:, :held] = self.bounds
        self.bounds = grown


def compile_selection() -> None:
    """Compiles the kernels, or loads them from Numba's cache."""
    shape, address = from_dtype(_SHAPE), types.int64
    _learn.compile((shape, *[address] * 5))
    _weigh.compile((shape, *[address] * 5))


@njit(nogil=True, cache=True)
def _learn(shape, addresses, layer_offset, pages, target, scratch):
    """Low and high [head_dim] of each kv head of each page."""
    head_dim = shape.head_dim
    for page in range(pages):
        for head in range(shape.kv_heads):
            keys = load_i64(addresses + 8 * page) + layer_offset + head * shape.key_head_bytes
            if shape.key_format != FP32:
                widen_keys(shape, keys, scratch)
                keys = scratch
            for d in range(head_dim):
                one, other = load8(keys + 64 * d), load8(keys + 64 * d + 32)
                store_f32(target + 4 * d, min(min8(one), min8(other)))
                store_f32(target + 4 * (head_dim + d), max(max8(one), max8(other)))
            target += 8 * head_dim


@njit(nogil=True, cache=True)
def _score(bounds, halves, pages, stride_bytes, half_bytes, scores):
    """What no key of each page exceeds, of one head; the largest of these."""
    largest = np.float32(-np.inf)
    for page in range(pages):
        at = bounds + page * stride_bytes
        even, odd = splat(np.float32(0)), splat(np.float32(0))
        for i in range(0, half_bytes, 64):
            even = fma(load8(halves + i), load8(at + i), even)
            odd = fma(load8(halves + i + 32), load8(at + i + 32), odd)
        score = sum8(add(even, odd))
        store_f32(scores + 4 * page, score)
        largest = max(largest, score)
    return largest


@njit(nogil=True, cache=True)
def _weigh(shape, bounds, query, pages, found, scratch):
    """The mean over heads of each page's share. `scratch`: halves of the query, scores of a head."""
    head_dim, half_bytes, group = shape.head_dim, 8 * shape.head_dim, shape.heads // shape.kv_heads
    scores = scratch + shape.heads * half_bytes
    for page in range(pages):
        store_f32(found + 4 * page, np.float32(0))
    for head in range(shape.heads):
        # Beside the bounds: what is negative of a query meets the lows, the rest the highs.
        halves = scratch + head * half_bytes
        for d in range(head_dim):
            x = load_f32(query + 4 * (head * head_dim + d))
            store_f32(halves + 4 * d, min(x, np.float32(0)))
            store_f32(halves + 4 * (head_dim + d), max(x, np.float32(0)))
        at = bounds + head // group * half_bytes
        largest = _score(at, halves, pages, shape.kv_heads * half_bytes, half_bytes, scores)
        total = np.float32(0)
        for page in range(pages):
            share = np.float32(math.exp(load_f32(scores + 4 * page) - largest))
            store_f32(scores + 4 * page, share)
            total += share
        factor = np.float32(1) / (total * np.float32(shape.heads))
        for page in range(pages):
            store_f32(found + 4 * page, load_f32(found + 4 * page) + factor * load_f32(scores + 4 * page))
