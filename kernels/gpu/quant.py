"""Repacking: the tokens of whole pages from one format to another, layer by layer.

Numbers are read out of the old pages as they stand for, turned or turned back where one of the formats turns its keys,
and written into the new ones as any new token is. So a page that is repacked has the bits it would have had if it had
been written in the new format, from keys and values as the old one kept them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import Call, Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.pages import check_layout, load_tile, places, turning
from tierd.kernels.gpu.write import Spans, plan_write
from tierd.kernels.layout import PageLayout


@triton.jit
def _read_kernel(
    addresses, base, keys, values, kv_heads, layer_offset, value_offset, key_stride, value_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT_BYTES: tl.constexpr, GROUP: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    page, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, d = tl.arange(0, 16), tl.arange(0, BLOCK_D)
    key_plane = base + layer_offset + kv_head * key_stride
    value_plane = base + layer_offset + value_offset + kv_head * value_stride
    k, v = load_tile(
        addresses + page, base, key_plane, value_plane, token, token >= 0, d, HEAD_DIM, ELEMENT_BYTES, GROUP,
        KEY_BITS, VALUE_BITS,
    )  # fmt: skip
    row = ((page * 16 + token) * kv_heads + kv_head) * HEAD_DIM
    mask = (token >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    at = row[:, None] + d[None, :]
    tl.store(keys + at, tl.trans(k.to(tl.float32)), mask=mask)
    tl.store(values + at, v.to(tl.float32), mask=mask)


def reading(addresses: Tensor, base: Tensor, layout: PageLayout, layer: int) -> Plan[tuple[Tensor, Tensor]]:
    """All tokens of pages in one layer: keys, turned back, and values, fp32 [pages * 16, kv_heads, head_dim].

    addresses  int64 [pages], checked by whoever made them (`check_addresses` in `pages.py`)

    What a page does not hold is what stale memory stands for. Raises ValueError for wrong shapes, types or devices.
    """
    check_layout(layout, base)
    check_tensor("addresses", addresses, [torch.int64], [None], base)
    check_contiguous("addresses", addresses)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    shape = (len(addresses) * layout.page_tokens, layout.kv_heads, layout.head_dim)
    keys, values = (torch.empty(shape, dtype=torch.float32, device=base.device) for _ in range(2))
    args = {
        "addresses": addresses, "base": base, "keys": keys, "values": values, "kv_heads": layout.kv_heads,
        **places(layout, layer), "HEAD_DIM": layout.head_dim, "BLOCK_D": next_power_of_2(layout.head_dim),
    }  # fmt: skip
    launch = Launch(_read_kernel, (len(addresses), layout.kv_heads), args)
    turned, turn = turning(keys, layout)  # its own inverse
    buffers = (keys, values) if turned is keys else (keys, values, turned)
    return Plan((turned, values), buffers, (launch, *turn))


def plan_quant(
    sources: Tensor, source_base: Tensor, source_layout: PageLayout, targets: Tensor, target_base: Tensor,
    target_layout: PageLayout, lengths: Tensor | None = None,
) -> Plan[None]:  # fmt: skip
    """`quant` without running it."""
    for name in ("num_layers", "kv_heads", "head_dim", "page_tokens"):
        if getattr(source_layout, name) != getattr(target_layout, name):
            raise ValueError(f"the pages differ in {name}")
    check_tensor("targets", targets, [torch.int64], [len(sources)], target_base)
    count, page_tokens, device = len(sources), source_layout.page_tokens, sources.device
    if lengths is not None:
        check_tensor("lengths", lengths, [torch.int32], [count], target_base)
    spans = torch.zeros((count, 3), dtype=torch.int32, device=device)
    spans[:, 0] = torch.arange(count, dtype=torch.int32, device=device) * page_tokens
    spans[:, 2] = page_tokens if lengths is None else lengths
    where = Spans(target_layout, targets, spans, target_base)
    launches: list[Launch | Call] = []
    buffers: list[Tensor] = []
    for layer in range(source_layout.num_layers):
        read = reading(sources, source_base, source_layout, layer)
        keys, values = read.result
        launches += [*read.launches, *plan_write(keys, values, where, layer).launches]
        buffers += read.buffers
    return Plan(None, tuple(buffers), tuple(launches))


def quant(
    sources: Tensor, source_base: Tensor, source_layout: PageLayout, targets: Tensor, target_base: Tensor,
    target_layout: PageLayout, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes pages in another format. Twin: `reference.quant`.

    sources, targets  int64 [pages], addresses of distinct records that don't overlap, checked by whoever made them
    bases             any 64-byte aligned tensor of each format's element type on the device
    layouts           of the same shape; the formats may be any two
    lengths           int32 [pages]: tokens of each page that are there, all by default; others keep what they hold

    Raises ValueError for wrong shapes, types or devices.
    """
    plan_quant(sources, source_base, source_layout, targets, target_base, target_layout, lengths).run()
