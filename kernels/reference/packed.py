"""Twins for packed pages, in float64: what the codes of a page stand for, and how tokens become codes.

The formulas are those of `kernels/layout.py`. A part of a page is [head, channel, token] here, for values as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierd.kernels.layout import PAGE_FORMATS, HeadSections, PageLayout

PAGE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FP8_MAX = 448.0  # the largest e4m3; torch makes a NaN of what is larger


def turned(x: Tensor, rotation: int) -> Tensor:  # [..., channels]
    """x by Walsh-Hadamard matrices over blocks of `rotation` channels, float64. Twice is x again."""
    h = torch.ones((1, 1), dtype=torch.float64, device=x.device)
    while len(h) < rotation:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (x.double().unflatten(-1, (-1, rotation)) @ h).flatten(-2) / rotation**0.5


def read_packed(layer: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Keys, turned back, and values of one layer's slice of a record (uint8), float64 [kv_heads, token, head_dim]."""
    keys, values = _Plane(layer, layout, of_keys=True), _Plane(layer, layout, of_keys=False)
    turned_keys = keys.read() + keys.anchor[:, :, None].double()
    return turned(turned_keys.transpose(1, 2), layout.rotation), values.read().transpose(1, 2)


def write_packed(layer: Tensor, layout: PageLayout, keys: Tensor, values: Tensor | None, first: int) -> None:
    """Packs keys, and values if there are any, as tokens `first`.. of one layer's slice of a record.

    Both are [kv_heads, tokens, head_dim].
    """
    plane = _Plane(layer, layout, of_keys=True)
    x = turned(keys, layout.rotation).transpose(1, 2)
    if first == 0:
        plane.anchor[:] = x[:, :, 0]
    plane.write(x - plane.anchor[:, :, None].double(), first)
    if values is not None:
        _Plane(layer, layout, of_keys=False).write(values.double().transpose(1, 2), first)


class _Plane:
    """The keys, or the values, of all heads in one layer: views of its sections."""

    def __init__(self, layer: Tensor, layout: PageLayout, of_keys: bool) -> None:
        self._layout, self._of_keys = layout, of_keys
        sections: HeadSections = layout.keys if of_keys else layout.values
        form = PAGE_FORMATS[layout.format]
        self._bits = form.key_bits if of_keys else form.value_bits
        start = 0 if of_keys else layout.plane_bytes
        heads = layer[start : start + layout.kv_heads * sections.stop].view(layout.kv_heads, sections.stop)
        groups = (layout.head_dim // layout.group, layout.page_tokens)
        self._codes = heads[:, : layout.head_elements * self._bits // 8]
        self._scales = _halves(heads, sections.scales, groups)
        self._minima = _halves(heads, sections.minima, groups) if sections.minima >= 0 else None
        self.anchor = _halves(heads, sections.anchor, (layout.head_dim,)) if of_keys else heads.new_empty(0)

    def read(self) -> Tensor:
        """What the codes stand for: [head, channel, token]."""
        x = self._get_codes().double() * self._by_channel(self._scales)
        return x if self._minima is None else x + self._by_channel(self._minima)

    def write(self, x: Tensor, first: int) -> None:
        """Packs x [head, channel, token] as tokens `first`.. of the page."""
        tokens = slice(first, first + x.shape[2])
        grouped = x.unflatten(1, (-1, self._layout.group))
        if self._minima is None:
            largest = 127
            low, step = torch.zeros_like(grouped[:, :, 0]), grouped.abs().amax(2) / largest
        else:
            largest = 15
            low, step = grouped.amin(2), (grouped.amax(2) - grouped.amin(2)) / largest
            self._minima[:, :, tokens] = low
            low = self._minima[:, :, tokens].double()
        self._scales[:, :, tokens] = step
        step = self._scales[:, :, tokens].double()
        count = (grouped - low[:, :, None]) / step[:, :, None]
        count = torch.where((step == 0)[:, :, None], 0.0, count).round().nan_to_num(0.0)
        codes = self._get_codes()
        codes[:, :, tokens] = count.clamp(0 if largest == 15 else -127, largest).flatten(1, 2).to(codes.dtype)
        self._set_codes(codes)

    def _by_channel(self, of_groups: Tensor) -> Tensor:
        return of_groups.double().repeat_interleave(self._layout.group, 1)

    def _get_codes(self) -> Tensor:
        """[head, channel, token], a copy."""
        if self._bits == 8:
            codes = self._codes.view(torch.int8)
        else:
            chunks = self._codes.unflatten(1, (-1, 8))
            codes = torch.stack((chunks & 15, chunks >> 4), 2).flatten(1)
        rows = self._layout.head_dim if self._of_keys else self._layout.page_tokens
        codes = codes.unflatten(1, (rows, -1))
        return (codes if self._of_keys else codes.transpose(1, 2)).clone()

    def _set_codes(self, codes: Tensor) -> None:
        flat = (codes if self._of_keys else codes.transpose(1, 2)).flatten(1)
        if self._bits == 8:
            self._codes.view(torch.int8)[:] = flat
        else:
            chunks = flat.unflatten(1, (-1, 2, 8))
            self._codes[:] = (chunks[:, :, 0] | chunks[:, :, 1] << 4).flatten(1)


def _halves(heads: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """A view of fp16 numbers: [head, *shape]."""
    stop = start + 2 * torch.Size(shape).numel()
    return heads[:, start:stop].view(torch.float16).unflatten(1, shape)
