"""shift: keys of whole pages turn, values and other layers stay; turning is adding positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import EPSILON, LAYER, LAYERS, aligned, draw, few_examples, paged
from tierd.kernels import reference
from tierd.kernels.gpu.shift import shift
from tierd.kernels.layout import PageLayout


@few_examples
@given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]), kv_heads=st.integers(1, 2),
    format=st.sampled_from(["fp32", "bf16", "fp16"]), count=st.integers(0, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_like_the_twin(head_dim: int, kv_heads: int, format: str, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = paged(PageLayout(LAYERS, kv_heads, head_dim, format), [16 * count], generator)
    [addresses] = case.pages
    angles = torch.randn((count, head_dim // 2), generator=generator)
    before = [memory.clone() for memory in case.memories]
    on_device = torch.tensor(addresses, dtype=torch.int64)
    shift(on_device, aligned(64, case.dtype), case.layout, LAYER, angles.cos(), angles.sin())
    ours = [reference.page_planes(case.memories, a, case.layout, LAYER)[0].clone() for a in addresses]
    after = [memory.clone() for memory in case.memories]
    for memory, old in zip(case.memories, before, strict=True):
        memory.copy_(old)
    reference.shift(case.memories, addresses, case.layout, LAYER, angles.cos(), angles.sin())
    for address, mine in zip(addresses, ours, strict=True):
        keys, _ = reference.page_planes(case.memories, address, case.layout, LAYER)
        assert torch.allclose(mine.double(), keys.double(), rtol=EPSILON[case.dtype], atol=1e-6)
        keys.copy_(mine)
    # All else has the same bytes.
    assert all(torch.equal(memory, new) for memory, new in zip(case.memories, after, strict=True))


def test_a_turned_key_is_the_key_of_the_sum_of_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), [16], generator)
    [[address]] = case.pages
    plain = draw((16, 1, 64), torch.float32, generator)
    rates = 10000.0 ** (-torch.arange(32) / 32)
    positions = torch.arange(16)[:, None]
    keys, _ = reference.page_planes(case.memories, address, case.layout, LAYER)
    keys[:] = reference.rope(plain, (positions * rates).cos(), (positions * rates).sin()).transpose(0, 1)
    delta = (-5 * rates)[None]
    shift(torch.tensor([address]), aligned(64, case.dtype), case.layout, LAYER, delta.cos(), delta.sin())
    moved = (positions - 5) * rates
    assert torch.allclose(keys, reference.rope(plain, moved.cos(), moved.sin()).transpose(0, 1), atol=1e-5)


def test_refuses() -> None:
    case = paged(PageLayout(LAYERS, 1, 64, "fp32"), [16], torch.Generator())
    address, base, table = torch.tensor(case.pages[0]), aligned(64, case.dtype), torch.zeros(1, 32)
    with pytest.raises(ValueError, match=r"sin: expected shape \[1, 32\], got \[2, 32\]"):
        shift(address, base, case.layout, LAYER, table, torch.zeros(2, 32))
    with pytest.raises(ValueError, match="layer -1 of 2"):
        shift(address, base, case.layout, -1, table, table)
    with pytest.raises(ValueError, match="base: expected float32, got float16"):
        shift(address, base.half(), case.layout, LAYER, table, table)
