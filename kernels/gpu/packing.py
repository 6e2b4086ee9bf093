"""The layout of quantized weights on the card, and how to get there from the panels of the CPU backend.

A matrix `w[rows, cols]` (rows are outputs) is cut into panels of 32 rows, and its columns into *pairs* of groups of 32;
what is missing at the end is filled up with weights of zero. A panel's weights follow each other in ascending columns,
so a program that walks down a panel reads one stream of memory, 32 bytes of neighbouring outputs at a time. With P
panels and G pairs:

    format     quants                                            scales
    int8-g32   uint8 [P][G][64][32]: q + 128                     int32 [P][G][32]: fp16 scales of the pair's first
                                                                 group (low half) and of its second (high half)
    int4-g32   uint8 [P][G][32][32]: column c of the first       int32 [P][G][2][32]: fp16 scale (low half) and fp16
               group in the low bits, of the second in the high  minimum (high half), of each group

The weights are, as on the CPU, `q * scale` and `q * scale + minimum` in float32. Scales come in words of 4 bytes
because that is the least that can be copied to shared memory asynchronously.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierd.kernels.gpu.launch import check_contiguous, check_tensor
from tierd.kernels.packing import GROUP_COLS, PANEL_ROWS, PackedMatrix, WeightFormat, sections

GPU_PANEL_ROWS = 32
PAIR_COLS = 2 * GROUP_COLS


@dataclass(frozen=True, slots=True)
class GpuMatrix:
    """A quantized matrix in the layout above. Raises ValueError for another format, shape, type or strides."""

    format: WeightFormat
    rows: int
    cols: int
    quants: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.cols <= 0 or self.cols % GROUP_COLS:
            raise ValueError(f"a matrix needs rows and whole groups of {GROUP_COLS}, got {self.rows} x {self.cols}")
        shape = [self.panels, self.pairs]
        if self.format is WeightFormat.INT4_G32:
            quants, scales = [*shape, GROUP_COLS, GPU_PANEL_ROWS], [*shape, 2, GPU_PANEL_ROWS]
        elif self.format is WeightFormat.INT8_G32:
            quants, scales = [*shape, PAIR_COLS, GPU_PANEL_ROWS], [*shape, GPU_PANEL_ROWS]
        else:
            raise ValueError(f"the card takes {WeightFormat.INT4_G32} and {WeightFormat.INT8_G32}, got {self.format}")
        check_tensor("quants", self.quants, [torch.uint8], quants)
        check_tensor("scales", self.scales, [torch.int32], scales, self.quants)
        check_contiguous("quants", self.quants)
        check_contiguous("scales", self.scales)

    @property
    def panels(self) -> int:
        """Panels of 32 rows."""
        return -(-self.rows // GPU_PANEL_ROWS)

    @property
    def pairs(self) -> int:
        """Pairs of groups along the columns."""
        return -(-self.cols // PAIR_COLS)

    def to(self, device: torch.device | str) -> GpuMatrix:
        """The same matrix on a device."""
        return GpuMatrix(self.format, self.rows, self.cols, self.quants.to(device), self.scales.to(device))


def from_panels(matrix: PackedMatrix) -> GpuMatrix:
    """The same weights, bit for bit, from the CPU's panel layout (`kernels/packing.py`), on the CPU."""
    at = sections(matrix.format, matrix.rows, matrix.cols)
    data = torch.from_numpy(matrix.data)
    groups = matrix.cols // GROUP_COLS
    quants = data[: at.quants_bytes]
    scales = _halves(data[at.scales_offset : at.scales_offset + at.scales_bytes], groups, matrix.rows)
    if matrix.format is WeightFormat.INT4_G32:
        words = quants.view(torch.int32).view(-1, matrix.cols // 8, 1, PANEL_ROWS)
        nibbles = (words >> torch.arange(0, 32, 4, dtype=torch.int32)[:, None]) & 15
        q = _panelled(nibbles.reshape(-1, matrix.cols, PANEL_ROWS).to(torch.uint8), PAIR_COLS, 0, matrix.rows)
        minimums = _halves(data[at.minimums_offset : at.minimums_offset + at.minimums_bytes], groups, matrix.rows)
        packed = q[:, :, :GROUP_COLS] | (q[:, :, GROUP_COLS:] << 4)
        return GpuMatrix(matrix.format, matrix.rows, matrix.cols, packed.contiguous(), scales | (minimums << 16))
    if matrix.format is WeightFormat.INT8_G32:
        biased = quants.view(-1, matrix.cols, PANEL_ROWS) ^ 128  # two's complement to q + 128
        q = _panelled(biased, PAIR_COLS, 128, matrix.rows)
        both = scales[:, :, 0] | (scales[:, :, 1] << 16)
        return GpuMatrix(matrix.format, matrix.rows, matrix.cols, q, both)
    raise ValueError(f"the card takes {WeightFormat.INT4_G32} and {WeightFormat.INT8_G32}, got {matrix.format}")


def _halves(section: Tensor, groups: int, rows: int) -> Tensor:
    """fp16 bits [CPU panels][groups][16] -> int32 [panels, pairs, 2, 32], in the low half."""
    bits = section.view(torch.int16).view(-1, groups, PANEL_ROWS).to(torch.int32) & 0xFFFF
    return _panelled(bits, 2, 0, rows)


def _panelled(values: Tensor, step: int, fill: int, rows: int) -> Tensor:
    """[CPU panels, n, 16] -> [panels, n / step, step, 32], filled up with `fill`; rows past the last are `fill` too."""
    panels, n, _ = values.shape
    wide = -(-panels * PANEL_ROWS // GPU_PANEL_ROWS)
    steps = -(-n // step)
    flat = values.new_full((wide * GPU_PANEL_ROWS, steps * step), fill)
    flat[:rows, :n] = values.transpose(1, 2).reshape(-1, n)[:rows]
    return flat.view(wide, GPU_PANEL_ROWS, steps, step).permute(0, 2, 3, 1).contiguous()
