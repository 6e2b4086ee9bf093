"""reference: the oracle itself, against torch's own operations and against definitions."""

from __future__ import annotations

import numpy as np
import torch

from tierd.kernels import reference
from tierd.kernels.layout import PageLayout


def test_norm_is_torchs() -> None:
    x, norm = torch.randn(5, 24, generator=torch.manual_seed(0)), torch.nn.RMSNorm(24, 1e-5)
    assert torch.allclose(reference.rms_norm(x, norm.weight, 1e-5), norm(x), atol=1e-6)


def test_rope_turns_pairs_and_keeps_lengths() -> None:
    x = torch.randn(3, 2, 8, generator=torch.manual_seed(0))
    angles = torch.rand(3, 4)
    turned = reference.rope(x, angles.cos(), angles.sin())
    pairs, expected = (torch.complex(*half.chunk(2, -1)) for half in (turned, x))
    assert torch.allclose(pairs, expected * torch.exp(1j * angles)[:, None], atol=1e-6)


def test_attention_is_torchs_causal_attention() -> None:
    generator = torch.manual_seed(0)
    keys, values = (torch.randn(4, 2, 16, 8, generator=generator) for _ in range(2))
    queries, table = torch.randn(40, 4, 8, generator=generator), [2, 0, 3]
    ours = reference.attention(queries, keys, values, range(40), [table] * 40)
    k, v = (torch.cat([plane[slot] for slot in table], 1)[None, :, :40] for plane in (keys, values))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
    )
    assert torch.allclose(ours, theirs[0].transpose(0, 1), atol=1e-5)


def test_a_window_hides_what_is_older() -> None:
    generator = torch.manual_seed(0)
    keys, values = (torch.randn(1, 1, 16, 8, generator=generator) for _ in range(2))
    queries = torch.randn(1, 1, 8, generator=generator)
    ours = reference.attention(queries, keys, values, [9], [[0]], window=1)
    assert torch.allclose(ours[0, 0], values[0, 0, 9])


def test_pages_are_views_of_the_documented_layout() -> None:
    layout = PageLayout(3, 2, 16, "fp16")
    arena = np.zeros((2, layout.record_bytes), np.uint8)
    keys, values = reference.pages(arena, layout, 1)
    keys[1, 1, 5, 7], values[1, 1, 5, 7] = 3, 4
    halves = arena[1].view(np.float16)
    base = layout.layer_elements + layout.head_elements
    assert halves[base + 7 * 16 + 5] == 3  # keys are [head_dim][token]
    assert halves[base + layout.plane_elements + 5 * 16 + 7] == 4  # values are [token][head_dim]
    assert np.count_nonzero(arena.view(np.float16)) == 2
