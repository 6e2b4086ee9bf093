"""reference.quantized: single weights at the places that the layout names."""

from __future__ import annotations

import numpy as np
import torch

from tierd.kernels import reference


def half_bits(value: float) -> int:
    return int(np.float16(value).view(np.uint16))


def test_a_4_bit_weight() -> None:
    quants = torch.zeros((2, 2, 32, 32), dtype=torch.uint8)
    scales = torch.zeros((2, 2, 2, 32), dtype=torch.int32)
    quants[1, 1, 5, 3] = 9 | 4 << 4  # row 35; column 69 in the low bits, 101 in the high
    scales[1, 1, 0, 3] = half_bits(0.5) | half_bits(2.0) << 16
    scales[1, 1, 1, 3] = half_bits(3.0) | half_bits(1.0) << 16
    weights = reference.gpu_weights(quants, scales, 40, 128)
    assert weights[35, 69] == 9 * 0.5 + 2
    assert weights[35, 101] == 4 * 3 + 1
    assert torch.count_nonzero(weights) == 64  # the row's minimums


def test_an_8_bit_weight() -> None:
    quants = torch.full((1, 2, 64, 32), 128, dtype=torch.uint8)
    scales = torch.zeros((1, 2, 32), dtype=torch.int32)
    quants[0, 1, 5, 3], quants[0, 1, 37, 3] = 128 - 7, 128 + 100
    scales[0, 1, 3] = half_bits(0.5) | half_bits(2.0) << 16
    weights = reference.gpu_weights(quants, scales, 32, 128)
    assert (weights[3, 69], weights[3, 101]) == (-3.5, 200)
    assert torch.count_nonzero(weights) == 2


def test_the_product_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 256, (1, 1, 64, 32), generator=generator, dtype=torch.uint8)
    scales = torch.full((1, 1, 32), half_bits(0.25) | half_bits(0.5) << 16, dtype=torch.int32)
    x, bias = torch.randn((3, 64), generator=generator), torch.randn(20, generator=generator)
    product = reference.quantized_matmul(x, quants, scales, 20, bias)
    weights = reference.gpu_weights(quants, scales, 20, 64)
    assert torch.allclose(product, torch.nn.functional.linear(x.double(), weights, bias.double()))
