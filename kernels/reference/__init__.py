"""The slow twin of every kernel, in torch: what the fast ones are tested against.

`decoder` holds the twins of the CPU backend, `paged`, `quantized`, `fused` and `sample` those of the GPU
kernels, which compute in float64 so that they are twin and judge in one.
"""

from __future__ import annotations

from tierd.kernels.reference.decoder import attention, forward, matmul, pages, rms_norm, rope, weights
from tierd.kernels.reference.fused import add_norm, rotate, swiglu
from tierd.kernels.reference.paged import attend, decode, extend, gather, merge, page_planes, scatter, shift, write
from tierd.kernels.reference.quantized import gpu_weights, quantized_matmul
from tierd.kernels.reference.sample import kept_mass, sample

__all__ = [
    "add_norm",
    "attend",
    "attention",
    "decode",
    "extend",
    "forward",
    "gather",
    "gpu_weights",
    "kept_mass",
    "matmul",
    "merge",
    "page_planes",
    "pages",
    "quantized_matmul",
    "rms_norm",
    "rope",
    "rotate",
    "sample",
    "scatter",
    "shift",
    "swiglu",
    "weights",
    "write",
]
