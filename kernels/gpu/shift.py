"""Moving stored keys to other positions: RoPE is a rotation by position, so a key at p turned by d is the key at p + d.

Used when tokens before a page are dropped and its keys shall be at positions within the cache (StreamingLLM; Xiao et
al. 2023). Values hold no position. Keys are rounded to the page's type again each time: a page should be shifted from
its original where that is at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.pages import PAGE_DTYPES, check_layout, record_offset
from tierd.kernels.layout import PageLayout


@triton.jit
def _shift_kernel(
    addresses, base, cos, sin, layer_offset,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
):  # fmt: skip
    index, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    record = record_offset(tl.load(addresses + index), base, ELEMENT_BYTES)
    d = tl.arange(0, BLOCK)
    in_half = d < HALF
    mask = in_half[:, None]
    at = base + layer_offset + kv_head * (32 * HALF) + record + (d * 16)[:, None] + tl.arange(0, 16)[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + 16 * HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + index * HALF + d, mask=in_half, other=0.0)[:, None]
    s = tl.load(sin + index * HALF + d, mask=in_half, other=0.0)[:, None]
    tl.store(at, (low * c - high * s).to(base.dtype.element_ty), mask=mask)
    tl.store(at + 16 * HALF, (high * c + low * s).to(base.dtype.element_ty), mask=mask)


def plan_shift(
    addresses: Tensor, base: Tensor, layout: PageLayout, layer: int, cos: Tensor, sin: Tensor
) -> Plan[None]:
    """`shift` without running it. The records it changes are not among the plan's buffers; each run turns them on."""
    check_layout(layout, base)
    if layout.format not in PAGE_DTYPES:
        raise ValueError(f"pages of {layout.format} are repacked to be shifted: see `quant`")
    check_tensor("addresses", addresses, [torch.int64], [None], base)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    half = layout.head_dim // 2
    check_tensor("cos", cos, [torch.float32], [len(addresses), half], base)
    check_tensor("sin", sin, [torch.float32], [len(addresses), half], base)
    for name, tensor in (("addresses", addresses), ("cos", cos), ("sin", sin)):
        check_contiguous(name, tensor)
    args = {
        "addresses": addresses, "base": base, "cos": cos, "sin": sin, "layer_offset": layer * layout.layer_elements,
        "HALF": half, "BLOCK": next_power_of_2(half), "ELEMENT_BYTES": layout.element_bytes,
    }  # fmt: skip
    return Plan(None, (), (Launch(_shift_kernel, (len(addresses), layout.kv_heads), args, 4, 1),))


def shift(addresses: Tensor, base: Tensor, layout: PageLayout, layer: int, cos: Tensor, sin: Tensor) -> None:
    """Turns the keys of whole pages in one layer, in place. Twin: `reference.shift`.

    addresses  int64 [pages], distinct, checked by whoever made them (`check_addresses` in `pages.py`)
    base       any 64-byte aligned tensor of the page's element type on the device
    cos, sin   fp32 [pages, head_dim / 2]: of the angles of each page's shift; the halves of a head are the pairs

    Raises ValueError for wrong shapes, types, devices or a layer that is not there.
    """
    plan_shift(addresses, base, layout, layer, cos, sin).run()
