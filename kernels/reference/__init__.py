"""The slow twin of every kernel, in torch: what the fast ones are tested against.

`decoder` and `moe` hold the twins of the CPU backend, `packed` what both backends make of packed pages; `paged`,
`quantized`, `fused`, `sample` and `selected` those of the GPU kernels, which compute in float64: they are twin and
judge in one.
"""

from __future__ import annotations

from tierd.kernels.reference.decoder import (
    angles,
    attention,
    attention_bounded,
    forward,
    matmul,
    pages,
    rms_norm,
    rope,
    weights,
)
from tierd.kernels.reference.fused import add_norm, rotate, swiglu
from tierd.kernels.reference.moe import group, mixture, route
from tierd.kernels.reference.packed import FP8_MAX, turned
from tierd.kernels.reference.paged import (
    attend,
    decode,
    extend,
    gather,
    merge,
    page_planes,
    put_tokens,
    scatter,
    shift,
    write,
)
from tierd.kernels.reference.quantized import gpu_weights, quantized_matmul
from tierd.kernels.reference.sample import kept_mass, sample
from tierd.kernels.reference.selected import bounds, quant, select

__all__ = [
    "FP8_MAX",
    "add_norm",
    "angles",
    "attend",
    "attention",
    "attention_bounded",
    "bounds",
    "decode",
    "extend",
    "forward",
    "gather",
    "gpu_weights",
    "group",
    "kept_mass",
    "matmul",
    "merge",
    "mixture",
    "page_planes",
    "pages",
    "put_tokens",
    "quant",
    "quantized_matmul",
    "rms_norm",
    "rope",
    "rotate",
    "route",
    "sample",
    "scatter",
    "select",
    "shift",
    "swiglu",
    "turned",
    "weights",
    "write",
]
