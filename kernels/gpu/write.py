"""Writing new keys and values into pages.

A *span* is some neighbouring rows of one sequence that go to neighbouring tokens of one page. One program moves one
span of one kv head as a tile of 16 tokens: rows are read along the head dimension, and keys are turned so that they are
written along the tokens, as they lie in a record ([head_dim][token], see `kernels/layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.codes import store_keys, store_values
from tierd.kernels.gpu.launch import FLOAT_DTYPES, Launch, Plan, check_contiguous, check_tensor, next_power_of_2
from tierd.kernels.gpu.pages import check_addresses, check_layout, places, record_offset, turning
from tierd.kernels.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Spans:
    """Where rows go. Use `build`, which checks the values while they are on the host; this checks shapes.

    addresses  int64 [spans]     of the page's record
    places     int32 [spans, 3]  first row, first token within the page, tokens; a span of no tokens writes nothing
    base       any 64-byte aligned tensor of the page's element type on the device
    """

    layout: PageLayout
    addresses: Tensor
    places: Tensor
    base: Tensor

    def __post_init__(self) -> None:
        check_layout(self.layout, self.base)
        check_tensor("addresses", self.addresses, [torch.int64], [None], self.base)
        check_tensor("places", self.places, [torch.int32], [len(self.addresses), 3], self.base)
        check_contiguous("addresses", self.addresses)
        check_contiguous("places", self.places)

    @staticmethod
    def build(
        layout: PageLayout,
        spans: Sequence[tuple[int, int, int, int]],  # (address, first row, first token, tokens)
        rows: int,
        memories: Sequence[Tensor],
        base: Tensor,
    ) -> Spans:
        """Spans on the device of `base`, from numbers on the host; `memories` as in `PageTable.build`.

        Raises ValueError naming the span that leaves its page, the `rows` there are, or the memories; and if two spans
        write one token.
        """
        written: set[tuple[int, int]] = set()
        for index, (address, row, token, count) in enumerate(spans):
            if token < 0 or count < 0 or token + count > layout.page_tokens:
                raise ValueError(f"span {index}: tokens {token} to {token + count} of {layout.page_tokens}")
            if layout.packed and token and any(a == address and t == 0 for a, _, t, _ in spans):
                raise ValueError(f"span {index}: the page's first token is written in this launch, join the two spans")
            if row < 0 or row + count > rows:
                raise ValueError(f"span {index}: rows {row} to {row + count} of {rows}")
            targets = {(address, at) for at in range(token, token + count)}
            if written & targets:
                raise ValueError(f"span {index}: writes tokens of record {address:#x} a second time")
            written |= targets
        addresses = torch.tensor([span[0] for span in spans], dtype=torch.int64)
        check_addresses(layout, addresses, memories, None, lambda index: f"span {index}")
        places = torch.tensor([span[1:] for span in spans], dtype=torch.int32).view(-1, 3)
        return Spans(layout, addresses.to(base.device), places.to(base.device), base)


@triton.jit
def _write_kernel(
    keys, values, addresses, places, base, k_row, k_head, k_dim, v_row, v_head, v_dim, layer_offset, value_offset,
    key_stride, value_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT_BYTES: tl.constexpr,
    GROUP: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    span, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_row = tl.load(places + span * 3).to(tl.int64)
    first_token, count = tl.load(places + span * 3 + 1), tl.load(places + span * 3 + 2)
    if count > 0:
        record = record_offset(tl.load(addresses + span), base, ELEMENT_BYTES)
        key_head = base + layer_offset + kv_head.to(tl.int64) * key_stride + record
        value_head = base + layer_offset + value_offset + kv_head.to(tl.int64) * value_stride + record
        token = tl.arange(0, 16)
        row = first_row + token - first_token
        is_row = (token >= first_token) & (token < first_token + count)
        d = tl.arange(0, BLOCK_D)
        in_dim = d < HEAD_DIM
        mask = is_row[:, None] & in_dim[None, :]
        k = tl.load(keys + (row * k_row + kv_head * k_head)[:, None] + (d * k_dim)[None, :], mask=mask, other=0.0)
        v = tl.load(values + (row * v_row + kv_head * v_head)[:, None] + (d * v_dim)[None, :], mask=mask, other=0.0)
        if KEY_BITS == 0:
            k, v = k.to(base.dtype.element_ty), v.to(base.dtype.element_ty)
            k_target = key_head + (d * 16)[:, None] + token[None, :]
            if count == 16:  # a mask by token would break 32-byte stores into 16
                tl.store(k_target, tl.trans(k), mask=in_dim[:, None])
            else:
                tl.store(k_target, tl.trans(k), mask=is_row[None, :] & in_dim[:, None])
            tl.store(value_head + (token * HEAD_DIM)[:, None] + d[None, :], v, mask=mask)
        else:
            store_keys(k.to(tl.float32), key_head, token, is_row, d, HEAD_DIM, GROUP, KEY_BITS)
            store_values(v.to(tl.float32), value_head, token, is_row, d, HEAD_DIM, GROUP, VALUE_BITS)


def plan_write(keys: Tensor, values: Tensor, spans: Spans, layer: int) -> Plan[None]:
    """`write` without running it. The records it writes are not among the plan's buffers."""
    layout = spans.layout
    for name, tensor in (("keys", keys), ("values", values)):
        check_tensor(name, tensor, FLOAT_DTYPES, [len(keys), layout.kv_heads, layout.head_dim], spans.base)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    turned, turn = turning(keys, layout)
    args = {
        "keys": turned, "values": values, "addresses": spans.addresses, "places": spans.places, "base": spans.base,
        "k_row": turned.stride(0), "k_head": turned.stride(1), "k_dim": turned.stride(2),
        "v_row": values.stride(0), "v_head": values.stride(1), "v_dim": values.stride(2),
        **places(layout, layer), "HEAD_DIM": layout.head_dim, "BLOCK_D": next_power_of_2(layout.head_dim),
    }  # fmt: skip
    return Plan(None, (), (*turn, Launch(_write_kernel, (len(spans.addresses), layout.kv_heads), args)))


def write(keys: Tensor, values: Tensor, spans: Spans, layer: int) -> None:
    """Writes rows of keys and values [rows, kv_heads, head_dim] into the pages of one layer. Twin: `reference.write`.

    Any float type and any strides; rounded to the pages' type to nearest even, or packed: then the first token of a
    page was written before, or is in the same span. Rows in no span go nowhere, tokens in no
    span keep what they hold. Raises ValueError for wrong shapes, types, devices or a layer that is not there.
    """
    plan_write(keys, values, spans, layer).run()
