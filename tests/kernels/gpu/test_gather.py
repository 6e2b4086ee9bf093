"""gather and scatter: bytes arrive where they belong, and no others change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import aligned, few_examples
from tierd.kernels import reference
from tierd.kernels.gpu.gather import gather, scatter


def random_bytes(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    block = aligned(rows * size, torch.uint8).view(rows, size)
    return block.copy_(torch.randint(0, 256, (rows, size), generator=generator, dtype=torch.uint8))


@few_examples
@given(
    count=st.integers(0, 4), size_bytes=st.sampled_from([0, 64, 4032, 16384, 20480]),
    spare_bytes=st.sampled_from([0, 64]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_like_the_twins(count: int, size_bytes: int, spare_bytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memories = [random_bytes(3, size_bytes + 64, generator) for _ in range(2)]
    order = torch.randperm(6, generator=generator)[:count].tolist()
    addresses = [memories[slot % 2][slot // 2].data_ptr() for slot in order]
    on_device = torch.tensor(addresses, dtype=torch.int64)
    ours = random_bytes(count, max(size_bytes + spare_bytes, 64), generator)
    theirs = ours.clone()
    gather(on_device, ours, size_bytes)
    reference.gather(memories, addresses, theirs, size_bytes)
    assert torch.equal(ours, theirs)

    ours.add_(1)
    before = [memory.clone() for memory in memories]
    scatter(ours, on_device, size_bytes)
    after = [memory.clone() for memory in memories]
    for memory, old in zip(memories, before, strict=True):
        memory.copy_(old)
    reference.scatter(memories, addresses, ours, size_bytes)
    assert all(torch.equal(mine, memory) for mine, memory in zip(after, memories, strict=True))


@pytest.mark.parametrize(
    ("addresses", "record_bytes", "size_bytes", "message"),
    [
        (3, 128, 128, r"addresses: expected shape \[2\], got \[3\]"),
        (2, 100, 64, "records: begin and size must be multiples of 64 bytes, got 100"),
        (2, 128, 192, "size_bytes must be a multiple of 64 up to 128, got 192"),
        (2, 128, 32, "size_bytes must be a multiple of 64 up to 128, got 32"),
    ],
)
def test_refuses(addresses: int, record_bytes: int, size_bytes: int, message: str) -> None:
    records = aligned(2 * record_bytes, torch.uint8).view(2, record_bytes)
    with pytest.raises(ValueError, match=message):
        gather(torch.zeros(addresses, dtype=torch.int64), records, size_bytes)
