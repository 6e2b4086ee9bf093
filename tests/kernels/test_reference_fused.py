"""reference.fused: against torch's own operations and against the decoder's twins."""

from __future__ import annotations

import torch

from tierd.kernels import reference


def test_add_norm_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn((5, 24), generator=generator) for _ in range(2))
    weight = torch.randn(24, generator=generator)
    normed, total = reference.add_norm(x, weight, 1e-5, residual, weight_offset=1.0)
    theirs = torch.nn.functional.rms_norm((x + residual).double(), (24,), weight.double() + 1, 1e-5)
    assert torch.allclose(normed, theirs)
    assert torch.equal(total, (x + residual).double())


def test_rotate_is_norm_then_rope() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, angles = torch.randn((3, 4, 8), generator=generator), torch.rand((9, 4), generator=generator)
    weights = (torch.rand(8, generator=generator), torch.rand(8, generator=generator))
    positions = torch.tensor([8, 0, 3], dtype=torch.int32)
    queries, keys = reference.rotate(qkv, 2, 1, angles.cos(), angles.sin(), positions, weights, 1e-6)
    cos, sin = angles.cos()[positions.long()].double(), angles.sin()[positions.long()].double()
    for ours, heads, weight in ((queries, qkv[:, :2], weights[0]), (keys, qkv[:, 2:3], weights[1])):
        assert torch.allclose(ours, reference.rope(reference.rms_norm(heads.double(), weight.double(), 1e-6), cos, sin))


def test_swiglu_at_known_points() -> None:
    ours = reference.swiglu(torch.tensor([[0.0, 100.0, -100.0, 3.0, 2.0, 5.0]]))
    assert torch.allclose(ours, torch.tensor([[0.0, 200.0, 0.0]], dtype=torch.float64))
