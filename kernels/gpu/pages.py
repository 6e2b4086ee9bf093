"""Page tables on the device, and how a kernel gets from an address to keys and values.

A page is named by the int64 address of its record, as on the CPU backend: pages of the device arena, of a staging ring
and of pinned CPU memory (which the card reads at its own addresses) mix in one launch. Triton reads 16 bytes at a time
only where it can prove an offset from a pointer argument to be aligned, and not from a pointer made of an integer. So
a kernel gets some tensor as `base` and adds `(address - base) / element size`; the hint that this is a multiple of 16
elements holds because `PageTable.build` checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.codes import EXACT, FP8, load_keys, load_values
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Call, check_contiguous, check_tensor
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

PAGE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_HEAD_DIM = 256
ALIGN_BYTES = 64  # 16 elements of fp32


@dataclass(frozen=True, slots=True)
class Copies:
    """Exact copies of some pages of a table (`kernels.rows.Exact`): of a page that has one, this is what is read.

    layout    of the copies: exact numbers. Keys are turned as those of the pages are
    pages     int64 [all pages]  addresses of records, 0 for a page that has none. Both pages of 32 tokens have one, or
              none has
    base      as that of a table
    """

    layout: PageLayout
    pages: Tensor
    base: Tensor

    def __post_init__(self) -> None:
        check_layout(self.layout, self.base)
        if self.layout.format not in PAGE_DTYPES:
            raise ValueError(f"exact copies hold numbers as they are, and not {self.layout.format}")
        check_tensor("copies", self.pages, [torch.int64], [None], self.base)
        check_contiguous("copies", self.pages)


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of some sequences. Use `build`, which checks the values while they are on the host; this checks shapes.

    pages     int64 [all pages]  addresses of records, sequence after sequence
    offsets   int32 [batch + 1]  where each sequence's pages begin
    lengths   int32 [batch]      tokens of each sequence, at most 16 a page
    max_pages                    no sequence has more pages: the size of grids, so that a captured graph can be kept
    base      any 64-byte aligned tensor of the page's element type, bytes for fp8 and codes, on the device
    copies    exact ones, beside fp8 and packed pages
    """

    layout: PageLayout
    pages: Tensor
    offsets: Tensor
    lengths: Tensor
    max_pages: int
    base: Tensor
    copies: Copies | None = None

    def __post_init__(self) -> None:
        check_layout(self.layout, self.base)
        if self.copies is not None and (self.layout.format in PAGE_DTYPES or len(self.copies.pages) != len(self.pages)):
            raise ValueError("copies are for each of the pages, which are packed")
        check_tensor("pages", self.pages, [torch.int64], [None], self.base)
        check_tensor("lengths", self.lengths, [torch.int32], [None], self.base)
        check_tensor("offsets", self.offsets, [torch.int32], [self.batch + 1], self.base)
        for name in ("pages", "offsets", "lengths"):
            check_contiguous(name, getattr(self, name))
        if self.max_pages < 0:
            raise ValueError(f"max_pages must not be negative, got {self.max_pages}")

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @staticmethod
    def build(
        layout: PageLayout,
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        memories: Sequence[Tensor],
        base: Tensor,
        max_pages: int | None = None,
        layer: int | None = None,
    ) -> PageTable:
        """A table on the device of `base`, from addresses on the host.

        `memories` are the contiguous tensors that addresses may point into. With `layer` only that layer's slice of
        each record need lie there: so a staged slice is named by where its record would begin.
        Raises ValueError naming the sequence if a record does not lie wholly in one memory, is not aligned to 64 bytes,
        or a length does not fit its pages.
        """
        if len(pages) != len(lengths):
            raise ValueError(f"{len(pages)} sequences with pages, but {len(lengths)} lengths")
        for sequence, (addresses, length) in enumerate(zip(pages, lengths, strict=True)):
            if not 0 <= length <= len(addresses) * layout.page_tokens:
                raise ValueError(f"sequence {sequence}: {length} tokens do not fit {len(addresses)} pages")
        counts = torch.tensor([0, *map(len, pages)])
        flat = torch.tensor([address for addresses in pages for address in addresses], dtype=torch.int64)
        ends = counts.cumsum(0)[1:]
        check_addresses(
            layout, flat, memories, layer, lambda at: f"sequence {int(torch.searchsorted(ends, at, right=True))}"
        )
        largest = int(counts.max())
        if max_pages is not None and max_pages < largest:
            raise ValueError(f"max_pages is {max_pages}, but a sequence has {largest} pages")
        return PageTable(
            layout,
            flat.to(base.device),
            counts.cumsum(0).to(torch.int32).to(base.device),
            torch.tensor(lengths, dtype=torch.int32).to(base.device),
            largest if max_pages is None else max_pages,
            base,
        )


def value_dtype(layout: PageLayout, activations: torch.dtype) -> torch.dtype:
    """The type of queries, keys and values for pages of this layout: the pages' own, or that of the activations."""
    return PAGE_DTYPES.get(layout.format, activations)


def copy_layout(layout: PageLayout, activations: torch.dtype) -> PageLayout | None:
    """That of exact copies of pages: they hold what is computed. None for pages that are exact themselves."""
    if layout.format in PAGE_DTYPES:
        return None
    return replace(layout, format=next(name for name, dtype in PAGE_DTYPES.items() if dtype == activations))


def base_of(layout: PageLayout, device: torch.device) -> Tensor:
    """A tensor that stands for memory in general, see above."""
    dtype = PAGE_DTYPES.get(layout.format, torch.uint8)
    size = torch.empty(0, dtype=dtype).element_size()
    block = torch.zeros(2 * ALIGN_BYTES, dtype=torch.uint8, device=device)
    return block[-block.data_ptr() % ALIGN_BYTES :][:ALIGN_BYTES].view(dtype) if size else block


def places(layout: PageLayout, layer: int) -> dict[str, int]:
    """What kernels are told of where a layer's heads lie, in elements of `base`, and of how to read them."""
    form = PAGE_FORMATS[layout.format]
    if layout.format in PAGE_DTYPES:
        unit, key_bits, value_bits = layout.element_bytes, EXACT.value, EXACT.value
    elif layout.packed:
        unit, key_bits, value_bits = 1, form.key_bits, form.value_bits
    else:
        unit, key_bits, value_bits = 1, FP8.value, FP8.value
    return {
        "layer_offset": layer * layout.layer_bytes // unit, "value_offset": layout.plane_bytes // unit,
        "key_stride": layout.keys.stop // unit, "value_stride": layout.values.stop // unit, "ELEMENT_BYTES": unit,
        "GROUP": layout.group, "KEY_BITS": key_bits, "VALUE_BITS": value_bits,
    }  # fmt: skip


def copy_places(copies: Copies | None, layer: int) -> dict[str, Any]:
    """What kernels are told of exact copies: see `load_either`."""
    if copies is None:
        return {"copies": None, "copy_base": None, "copy_layer": 0, "copy_values": 0, "COPY_BYTES": 0}
    at = places(copies.layout, layer)
    return {
        "copies": copies.pages, "copy_base": copies.base, "copy_layer": at["layer_offset"],
        "copy_values": at["value_offset"], "COPY_BYTES": at["ELEMENT_BYTES"],
    }  # fmt: skip


def query_dtypes(layout: PageLayout) -> Sequence[torch.dtype]:
    """The types that queries, keys and values may have."""
    return [PAGE_DTYPES[layout.format]] if layout.format in PAGE_DTYPES else FLOAT_DTYPES


def turning(x: Tensor, layout: PageLayout) -> tuple[Tensor, tuple[Call, ...]]:
    """x [rows, heads, head_dim] turned as the keys of packed pages are, and what computes it; x itself for others."""
    if layout.rotation == 1:
        return x, ()
    matrix = _hadamard(layout.head_dim, layout.rotation, x.dtype, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = out.view(-1, layout.head_dim)
    return out, (Call(lambda: torch.mm(x.reshape(-1, layout.head_dim), matrix, out=rows)),)


@lru_cache(maxsize=8)
def _hadamard(head_dim: int, rotation: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Walsh-Hadamard blocks on the diagonal, normalized: the parity of the bits that two indices share is the sign."""
    index = torch.arange(head_dim)
    shared = index[:, None] & index[None, :] & (rotation - 1)
    odd = sum((shared >> bit) & 1 for bit in range(rotation.bit_length())) & 1
    signs = torch.where(index[:, None] // rotation == index[None, :] // rotation, 1.0 - 2.0 * odd, 0.0)
    return (signs / rotation**0.5).to(dtype).to(device)


def check_layout(layout: PageLayout, base: Tensor) -> None:
    """Raises ValueError for a layout that the kernels do not take, or a base that does not go with it."""
    if layout.page_tokens != 16:
        raise ValueError(f"the kernels take pages of 16 tokens, got {layout.page_tokens}")
    if layout.head_dim % 16 or layout.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {layout.head_dim}")
    check_tensor("base", base, [PAGE_DTYPES.get(layout.format, torch.uint8)], [None] * base.dim())
    if base.device.type != "meta" and base.data_ptr() % ALIGN_BYTES:
        raise ValueError(f"base: must be aligned to {ALIGN_BYTES} bytes")


def check_addresses(
    layout: PageLayout, addresses: Tensor, memories: Sequence[Tensor], layer: int | None, owner: Callable[[int], str]
) -> None:
    """Raises ValueError unless every int64 address, on the host, is aligned and its record (or one layer's slice of it)
    lies in one of the memories; `owner` says whose address the one at an index is."""
    size = layout.payload_bytes if layer is None else layout.layer_bytes
    first = addresses if layer is None else addresses + layer * layout.layer_bytes
    inside = torch.zeros(len(addresses), dtype=torch.bool)
    for memory in memories:
        start = memory.data_ptr()
        inside |= (first >= start) & (first <= start + memory.nbytes - size)
    bad = ~(inside & (first % ALIGN_BYTES == 0))
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"{owner(at)}: no whole, aligned record at address {int(addresses[at]):#x}")


@triton.jit
def record_offset(address, base, ELEMENT_BYTES: tl.constexpr):
    """Elements from `base` to the record at `address`, known to be a multiple of 16."""
    away = address - base.to(tl.int64)
    if ELEMENT_BYTES > 1:  # the compiler drops a division by one, and with it what was said of its result
        away = away // ELEMENT_BYTES
    return tl.multiple_of(away, 16)


@triton.jit
def load_tile(
    pages, base, key_plane, value_plane, token, present, d, HEAD_DIM: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    GROUP: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Keys [D, N] and values [N, D] of tokens [N] of a sequence; 0 where `present` [N] is false for the token's page.

    `pages` points at the sequence's first address; the planes are `base` plus the offset of layer and head in a record.
    Numbers of exact pages in their own type, others in fp32, keys of packed pages turned.
    """
    address = tl.load(pages + token // 16, mask=present, other=0)
    record = record_offset(address, base, ELEMENT_BYTES)
    in_dim = d < HEAD_DIM
    if KEY_BITS == 0:
        keys = tl.load(
            key_plane + record[None, :] + (d * 16)[:, None] + (token % 16)[None, :],
            mask=in_dim[:, None] & present[None, :],
            other=0.0,
        )
        values = tl.load(
            value_plane + record[:, None] + ((token % 16) * HEAD_DIM)[:, None] + d[None, :],
            mask=present[:, None] & in_dim[None, :],
            other=0.0,
        )
    else:
        key_mask, value_mask = in_dim[:, None] & present[None, :], present[:, None] & in_dim[None, :]
        keys = load_keys(key_plane + record[None, :], token % 16, key_mask, d, HEAD_DIM, GROUP, KEY_BITS)
        values = load_values(value_plane + record[:, None], token % 16, value_mask, d, HEAD_DIM, GROUP, VALUE_BITS)
    return keys, values


@triton.jit
def load_either(
    x, pages, copies, first, base, copy_base, key_plane, value_plane, kv_head, copy_layer, copy_values, start, token,
    present, d, HEAD_DIM: tl.constexpr, ELEMENT_BYTES: tl.constexpr, GROUP: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, COPY_BYTES: tl.constexpr,
):  # fmt: skip
    """`load_tile` in the type of `x`, of exact copies where the page of the first token, `start`, has one. `first`: the
    sequence's first page among all; COPY_BYTES: of an element of the copies, 0 where there are none."""
    if COPY_BYTES == 0:
        keys, values = load_tile(
            pages + first, base, key_plane, value_plane, token, present, d, HEAD_DIM, ELEMENT_BYTES, GROUP, KEY_BITS,
            VALUE_BITS,
        )  # fmt: skip
        keys, values = keys.to(x.dtype), values.to(x.dtype)
    else:
        if tl.load(copies + first + start // 16) != 0:
            copy_keys = copy_base + copy_layer + kv_head.to(tl.int64) * (HEAD_DIM * 16)
            keys, values = load_tile(
                copies + first, copy_base, copy_keys, copy_keys + copy_values, token, present, d, HEAD_DIM, COPY_BYTES,
                1, 0, 0,
            )  # fmt: skip
            keys, values = keys.to(x.dtype), values.to(x.dtype)
        else:
            keys, values = load_tile(
                pages + first, base, key_plane, value_plane, token, present, d, HEAD_DIM, ELEMENT_BYTES, GROUP,
                KEY_BITS, VALUE_BITS,
            )  # fmt: skip
            keys, values = keys.to(x.dtype), values.to(x.dtype)
    return keys, values
