"""reference.paged: the twins of the attention kernels, against torch's own attention and against definitions."""

from __future__ import annotations

import math

import pytest
import torch

from tierd.kernels import reference
from tierd.kernels.layout import PageLayout

LAYOUT = PageLayout(2, 2, 16, "fp32")


def memory(slots: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn((slots, LAYOUT.record_bytes // 4), generator=generator)
    return values.view(torch.uint8)


def test_planes_are_views_of_the_documented_layout() -> None:
    records = memory(3, torch.Generator())
    records.zero_()
    keys, values = reference.page_planes([records], records[2].data_ptr(), LAYOUT, 1)
    keys[1, 5, 7], values[1, 5, 7] = 3, 4
    floats = records[2].view(torch.float32)
    base = LAYOUT.layer_elements + LAYOUT.head_elements
    assert floats[base + 7 * 16 + 5] == 3  # keys are [head_dim][token]
    assert floats[base + LAYOUT.plane_elements + 5 * 16 + 7] == 4  # values are [token][head_dim]


def test_a_record_lies_wholly_in_memory() -> None:
    records = memory(2, torch.Generator())
    with pytest.raises(ValueError, match=r"no \d+ bytes at address"):
        reference.page_planes([records], records[1].data_ptr() + LAYOUT.record_bytes, LAYOUT, 0)


def test_attend_is_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn((9, 4, 16), generator=generator)
    keys, values = (torch.randn((9, 2, 16), generator=generator) for _ in range(2))
    visible = torch.ones((9, 9), dtype=torch.bool).tril()
    ours, _, weights = reference.attend(queries, keys, values, visible, 0.3)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (queries, keys, values)), is_causal=True, enable_gqa=True, scale=0.3
    )
    assert torch.allclose(ours, theirs[0].transpose(0, 1))
    assert torch.allclose(weights.sum(-1), torch.ones((), dtype=torch.float64))


def test_a_sink_takes_its_share() -> None:
    one = torch.ones((1, 1, 16))
    seen = torch.ones((1, 1), dtype=torch.bool)
    out, lse, _ = reference.attend(one, one, one, seen, 0.25, sinks=torch.tensor([4.0]))  # the score is 4 as well
    assert torch.allclose(out, torch.full((), 0.5, dtype=torch.float64))
    assert math.isclose(float(lse), 4 + math.log(2))


def test_a_soft_cap_bounds_scores() -> None:
    one = torch.ones((1, 1, 16))
    seen = torch.ones((1, 1), dtype=torch.bool)
    _, lse, _ = reference.attend(one, one, one, seen, 100.0, soft_cap=5.0)
    assert math.isclose(float(lse), 5.0)


def test_what_sees_nothing_is_zero() -> None:
    nan = torch.full((1, 1, 16), math.nan)
    out, lse, _ = reference.attend(torch.ones(1, 1, 16), nan, nan, torch.zeros((1, 1), dtype=torch.bool), 1.0)
    assert out.abs().max() == 0
    assert lse.item() == -math.inf


def test_extend_is_decode_row_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    records = memory(4, generator)
    addresses = [records[slot].data_ptr() for slot in (2, 0)]
    queries, keys, values = (torch.randn((5, heads, 16), generator=generator) for heads in (4, 2, 2))
    spans = [(addresses[1], 0, 4, 5)]  # the sequence holds 20 tokens
    options = {"scale": 0.3, "window": 7}
    out, lse = reference.extend(
        queries, keys, values, [0, 5], [records], LAYOUT, 1, [addresses], [20], **options
    )
    reference.write(keys, values, [records], LAYOUT, 1, spans)
    for row in range(5):
        one, one_lse, mass = reference.decode(
            queries[row : row + 1], [records], LAYOUT, 1, [addresses], [21 + row], **options
        )
        assert torch.allclose(one[0], out[row])
        assert torch.allclose(one_lse[0], lse[row])
        assert torch.allclose(mass.sum(0), torch.ones((), dtype=torch.float64))
