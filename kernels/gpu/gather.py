"""Scattered records <-> contiguous ones: what a move between tiers, a staging buffer or a copy on write needs.

Addresses may be of any memory that the card can read or write: its own, or pinned CPU memory, which then crosses the
link 16 bytes a thread at a time without a copy engine. One launch moves many records, where a copy each costs
microseconds of the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierd.kernels.gpu.launch import Launch, Plan, check_contiguous, check_tensor
from tierd.kernels.gpu.pages import ALIGN_BYTES, record_offset

_BLOCK_WORDS = 2048  # 16 KB: 128 threads move 8 times 16 bytes each
_WORD_BYTES = 8


@triton.jit
def _gather_kernel(addresses, records, words, record_words, TO_RECORDS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    scattered = records + record_offset(tl.load(addresses + index), records, 8) + word
    contiguous = records + index * record_words + word
    if TO_RECORDS:
        tl.store(contiguous, tl.load(scattered, mask=mask), mask=mask)
    else:
        tl.store(scattered, tl.load(contiguous, mask=mask), mask=mask)


def _plan(addresses: Tensor, records: Tensor, size_bytes: int, to_records: bool) -> Plan[Tensor]:
    check_tensor("records", records, [torch.uint8], [None, None])
    check_contiguous("records", records)
    check_tensor("addresses", addresses, [torch.int64], [len(records)], records)
    check_contiguous("addresses", addresses)
    size = records.shape[1]
    if size == 0 or size % ALIGN_BYTES or records.device.type != "meta" and records.data_ptr() % ALIGN_BYTES:
        raise ValueError(f"records: begin and size must be multiples of {ALIGN_BYTES} bytes, got {size}")
    if not 0 <= size_bytes <= size or size_bytes % ALIGN_BYTES:
        raise ValueError(f"size_bytes must be a multiple of {ALIGN_BYTES} up to {size}, got {size_bytes}")
    words = size_bytes // _WORD_BYTES
    args = {
        "addresses": addresses, "records": records.view(torch.int64), "words": words,
        "record_words": size // _WORD_BYTES, "TO_RECORDS": to_records, "BLOCK": _BLOCK_WORDS,
    }  # fmt: skip
    launch = Launch(_gather_kernel, (-(-words // _BLOCK_WORDS), len(records)), args)
    return Plan(records, (records,) if to_records else (), (launch,))


def plan_gather(addresses: Tensor, records: Tensor, size_bytes: int) -> Plan[Tensor]:
    """`gather` without running it."""
    return _plan(addresses, records, size_bytes, to_records=True)


def gather(addresses: Tensor, records: Tensor, size_bytes: int) -> Tensor:
    """Copies the first `size_bytes` at each address into the rows of `records`. Twin: `reference.gather`.

    addresses  int64 [n], aligned to 64 bytes, checked by whoever made them (`check_addresses` in `pages.py`)
    records    uint8 [n, record bytes], contiguous, rows aligned to 64 bytes; what lies past `size_bytes` stays

    Raises ValueError for a wrong shape, type, size or alignment. Returns `records`.
    """
    return plan_gather(addresses, records, size_bytes).run()


def plan_scatter(records: Tensor, addresses: Tensor, size_bytes: int) -> Plan[Tensor]:
    """`scatter` without running it."""
    return _plan(addresses, records, size_bytes, to_records=False)


def scatter(records: Tensor, addresses: Tensor, size_bytes: int) -> None:
    """Copies the first `size_bytes` of each row of `records` to its address: the way back. Twin: `reference.scatter`.

    As `gather`; the addresses must be distinct, and none may lie in `records`.
    """
    plan_scatter(records, addresses, size_bytes).run()
